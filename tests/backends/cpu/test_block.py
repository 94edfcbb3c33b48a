"""The linear side of a decoder layer, and the head, against float64 and against torch's own path.

Shape suffixes as in backends/kernel_api.py; Q = H * D, P = G * D, M MLP size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.paged_kv import native, usable
from tests.helpers.thread_ranks import together
from triforce.arrays import to_host
from triforce.backends.torch import model
from triforce.backends.torch.model import TorchLayer
from triforce.backends.torch.tensors import tensor_of
from triforce.distributed.group import ALONE, TPGroup
from triforce.model.config import Architecture
from triforce.model.weights import Layer

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
from triforce.backends.cpu.model import NativeLayerShard

EPS = 1e-5
FAMILIES = {
    "llama": dict(C=64, Q=64, P=32, M=96, D=16),
    "biased, odd": dict(C=100, Q=96, P=96, M=50, D=32, biases=True),
    "qwen3": dict(C=48, Q=320, P=80, M=200, D=80, norms=True),
    "wide": dict(C=33, Q=256, P=256, M=2100, D=256),
}


@pytest.fixture(autouse=True, params=usable(), ids=lambda use: f"{use[0]}-{str(use[1])[6:]}")
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    level, threads = native.level(), native.threads()
    native.use(request.param[0])
    yield request.param[1]
    native.use(level)
    native.set_threads(threads)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


class Exact:
    """The layer in float64."""

    def __init__(self, layer: Layer, head_dim: int) -> None:
        names = (f.name for f in fields(layer) if f.name != "experts")
        self.w = {name: w.double() for name in names if (w := getattr(layer, name)) is not None}
        self.head_dim = head_dim

    def qkv(self, x_NC: Tensor) -> tuple[Tensor, ...]:
        y_NC = norm(x_NC.double(), self.w["input_norm_C"])
        return tuple(self._heads(y_NC, *name) for name in ("qQ", "kP", "vP"))

    def _heads(self, y_NC: Tensor, name: str, size: str) -> Tensor:
        x_NGD = self._product(y_NC, name, f"{size}C").view(len(y_NC), -1, self.head_dim)
        return norm(x_NGD, self.w[f"{name}_norm_D"]) if f"{name}_norm_D" in self.w else x_NGD

    def finish(self, x_NC: Tensor, mixed_NQ: Tensor) -> Tensor:
        x_NC = x_NC.double() + self._product(mixed_NQ.double(), "o", "CQ")
        y_NC = norm(x_NC, self.w["post_norm_C"])
        gate_NM, up_NM = (self._product(y_NC, name, "IC") for name in ("gate", "up"))
        return x_NC + self._product(gate_NM * gate_NM.sigmoid() * up_NM, "down", "CI")

    def _product(self, x: Tensor, name: str, sizes: str) -> Tensor:
        return x @ self.w[f"{name}_proj_{sizes}"].T + self.w.get(f"{name}_bias_{sizes[0]}", 0)


def tensors(layer: Layer) -> list[Any]:
    """Return the tensors that Qwen's layers have, in the order of arguments."""
    return [getattr(layer, f.name) for f in fields(layer)][:14]


class Small:
    """A layer with random weights: as the native block, on the torch path, and in float64."""

    def __init__(
        self, C: int, Q: int, P: int, M: int, D: int, dtype: torch.dtype, biases: bool = False, norms: bool = False
    ) -> None:
        draw = torch.Generator().manual_seed(0)

        def random_tensor(*shape: int, gain: float = 1.0, base: float = 0.0) -> Tensor:
            return (torch.randn(*shape, generator=draw) * gain + base).to(dtype)

        linear = [
            random_tensor(o, i, gain=i**-0.5) for o, i in [(Q, C), (P, C), (P, C), (C, Q), (M, C), (M, C), (C, M)]
        ]
        scales = [random_tensor(size, gain=0.1, base=1.0) for size in (C, C, D, D)]
        q, k, v, o, gate, up, down = linear
        layer = Layer(scales[0], q, k, v, o, scales[1], gate, up, down)
        if biases:
            layer = replace(
                layer,
                q_bias_Q=random_tensor(Q),
                k_bias_P=random_tensor(P),
                v_bias_P=random_tensor(P),
                o_bias_C=random_tensor(C),
            )
            layer = replace(
                layer, gate_bias_I=random_tensor(M), up_bias_I=random_tensor(M), down_bias_C=random_tensor(C)
            )
        if norms:
            layer = replace(layer, q_norm_D=scales[2], k_norm_D=scales[3])
        self.sizes, self.dtype, self.layer = (Q, P, P), dtype, layer
        late_biases = {
            name[:-2]: getattr(layer, name) for name in ("o_bias_C", "gate_bias_I", "up_bias_I", "down_bias_C")
        }
        self.block = native.DecoderLayer(*tensors(layer), **late_biases, head_dim=D, eps=EPS)
        config: Any = SimpleNamespace(norm_eps=EPS, head_dim=D, architecture=Architecture(), intermediate_size=M)
        self.plain, self.exact = TorchLayer(config, layer), Exact(layer, D)
        self.x_NC = torch.randn(130, C, generator=draw).to(dtype).float()
        self.mixed_NQ = random_tensor(130, Q)

    def qkv(self, rows: slice = slice(None)) -> list[Tensor]:
        x = self.x_NC[rows].contiguous()
        out = [torch.full((len(x), size), torch.nan) for size in self.sizes]
        self.block.qkv(x, *out)
        return out

    def finish(self, rows: slice = slice(None)) -> Tensor:
        x = self.x_NC[rows].clone()
        self.block.finish(x, self.mixed_NQ[rows].contiguous())
        return x


@pytest.fixture(params=FAMILIES)
def small(request: pytest.FixtureRequest, dtype: torch.dtype) -> Small:
    return Small(dtype=dtype, **FAMILIES[request.param])


def distance(x: Tensor, exact: Tensor) -> float:
    return (x.double().flatten() - exact.flatten()).square().mean().sqrt().item()


def test_block_error_no_larger_than_torch(small: Small, dtype: torch.dtype) -> None:
    """The native block rounds the inputs of matrices only; torch rounds each result.

    In float32 the order of sums differs.
    """
    slack = 1.0 if dtype == torch.bfloat16 else 3.0
    theirs = small.plain.qkv(small.x_NC.to(dtype))
    for x, their, exact in zip(small.qkv(), theirs, small.exact.qkv(small.x_NC), strict=True):
        assert distance(x, exact) <= slack * distance(their, exact)
    x_NC = small.x_NC.to(dtype, copy=True)
    exact_NC = small.exact.finish(small.x_NC, small.mixed_NQ)
    small.plain.finish(x_NC, small.mixed_NQ)
    assert distance(small.finish(), exact_NC) <= slack * distance(x_NC, exact_NC)


def test_block_row_bits_independent_of_batch(small: Small) -> None:
    batch_qkv = small.qkv()
    finished = small.finish()
    for threads in (1, 2):
        native.set_threads(threads)
        for rows in [slice(0, 1), slice(5, 12), slice(3, 19), slice(100, 101), slice(0, 120), slice(None)]:
            assert all(torch.equal(a[rows], b) for a, b in zip(batch_qkv, small.qkv(rows), strict=True))
            assert torch.equal(finished[rows], small.finish(rows))


def test_swiglu_extreme_gates_equal_float64(dtype: torch.dtype) -> None:
    """A gate far below zero gives 0. A gate far above zero gives its own value."""
    C = 16
    unit_C = torch.ones(C, dtype=dtype)
    zeros_CC = torch.zeros(C, C, dtype=dtype)
    gates = torch.tensor([-3e38, -1e4, -90, -87, 0, 87, 1e4, 1e30, *[1.0] * 8]).to(dtype)
    block = native.DecoderLayer(
        unit_C, zeros_CC, zeros_CC, zeros_CC, zeros_CC, unit_C, gates.repeat(C, 1).T.contiguous() / C,
        torch.ones(C, C, dtype=dtype) / C, torch.eye(C, dtype=dtype), *[None] * 5, head_dim=16, eps=0.0,
    )  # fmt: skip
    x = torch.ones(1, C)
    block.finish(x, torch.zeros(1, C, dtype=dtype))
    exact = torch.nn.functional.silu(gates.double())
    torch.testing.assert_close(x[0].double() - 1, exact, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(("V", "C"), [(256, 64), (1003, 100)])
def test_head_logits_equal_float64(V: int, C: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, scale = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((V, C), (C,)))
    x = torch.randn(21, C, generator=draw)
    logits = torch.empty(21, V)
    head = native.LmHead(scale, native.Matrix(weight), eps=EPS)
    head.logits(x, logits)
    exact = norm(x.double(), scale.double()) @ weight.double().T
    theirs = (model.norm(x.to(dtype), scale, EPS) @ weight.T).float()
    assert distance(logits, exact) <= 2 * distance(theirs, exact)
    row_logits = torch.empty(1, V)
    head.logits(x[7:8].contiguous(), row_logits)
    assert torch.equal(row_logits[0], logits[7])


def test_block_bad_arguments_raise(small: Small, dtype: torch.dtype) -> None:
    q, k, v = small.qkv(slice(2))
    x = small.x_NC[:2].clone()
    attn_out = small.mixed_NQ[:2].clone()
    with pytest.raises(ValueError, match="x must be float32"):
        small.block.qkv(x.double(), q, k, v)
    with pytest.raises(ValueError, match="k must be"):
        small.block.qkv(x, q, k[:1], v)
    with pytest.raises(ValueError, match="attn_out must be"):
        small.block.finish(x, attn_out[:1])
    with pytest.raises(ValueError, match="attn_out must be"):
        small.block.finish(x, attn_out.double())
    weights = tensors(small.layer)
    for index, message in [
        (0, "input_norm"),
        (1, "q_proj|whole heads"),
        (2, "k_proj|v_proj"),
        (4, "o_proj"),
        (7, "up_proj"),
    ]:
        wrong = [w[:-1].contiguous() if i == index else w for i, w in enumerate(weights)]
        with pytest.raises(ValueError, match=message):
            native.DecoderLayer(*wrong, head_dim=small.plain.config.head_dim, eps=EPS)
    with pytest.raises(ValueError, match="both have biases, or none"):
        native.DecoderLayer(
            *weights, up_bias=torch.zeros(len(weights[7])), head_dim=small.plain.config.head_dim, eps=EPS
        )
    with pytest.raises(ValueError, match="multiple of 16"):
        native.DecoderLayer(*weights, head_dim=24, eps=EPS)


def part(layer: Layer, D: int, heads: slice, output_rows: slice, mlp: slice) -> NativeLayerShard:
    """Return a shard of some query heads, and of some outputs of the other matrices. K and V are whole."""
    queries = slice(heads.start * D, heads.stop * D)
    outputs = dict(
        q_proj_QC=queries, q_bias_Q=queries, gate_proj_IC=mlp, gate_bias_I=mlp, up_proj_IC=mlp, up_bias_I=mlp,
        o_proj_CQ=output_rows, o_bias_C=output_rows, down_proj_CI=output_rows, down_bias_C=output_rows,
    )  # fmt: skip
    weights = {field.name: to_host(w) for field in fields(layer) if isinstance(w := getattr(layer, field.name), Tensor)}
    cut = replace(layer, **{name: w[outputs.get(name, slice(None))] for name, w in weights.items()})
    config: Any = SimpleNamespace(
        norm_eps=EPS, head_dim=D, heads=heads.stop - heads.start, kv_heads=len(layer.k_proj_PC) // D,
        architecture=Architecture(), int8_inputs=False,
    )  # fmt: skip
    return NativeLayerShard(config, cut, bits=0)


def test_shard_bits_equal_whole_block(small: Small) -> None:
    """Bits do not depend on the split of the outputs, also where shards are no multiples of 16."""
    layer = small.layer
    D = small.plain.config.head_dim
    Q, C = layer.q_proj_QC.shape
    M = len(layer.gate_proj_IC)
    heads = cut(Q // D, 1) if Q > D else (slice(0, 1),)
    parts = [part(layer, D, heads[i % len(heads)], cut(C, 7)[i], cut(M, 19)[i]) for i in range(2)]
    q, k, v = (x.unflatten(1, (-1, D)) for x in small.qkv())
    shard_qkv = [[*map(tensor_of, shard.qkv(to_host(small.x_NC), ALONE))] for shard in parts[: len(heads)]]
    assert torch.equal(torch.cat([queries for queries, *_ in shard_qkv], 1), q)
    assert all(torch.equal(keys, k) and torch.equal(values, v) for _, keys, values in shard_qkv)

    def finished(ranks: TPGroup) -> Tensor:
        x_NC = small.x_NC.clone()
        parts[ranks.rank].finish(to_host(x_NC), to_host(small.mixed_NQ[:, cut(Q, 16)[ranks.rank]]), ranks)
        return x_NC

    assert all(torch.equal(x_NC, small.finish()) for x_NC in together(2, finished))


def cut(size: int, at: int) -> tuple[slice, slice]:
    return slice(0, at), slice(at, size)

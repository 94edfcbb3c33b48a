"""Whole passes through Triton's model and memory against the torch path: logits, queries, mass, and written KV.

Shape suffixes as in backends/kernel_api.py.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.cuda.scene import DEVICE, by_the_term
from triforce.backends.cuda import model as cuda_model
from triforce.backends.cuda.kv import TritonKV
from triforce.backends.cuda.model import TritonLayer, TritonModel
from triforce.backends.kernel_api import ForwardBatch, ForwardOutput, PageTable
from triforce.backends.torch.kv import TorchKV
from triforce.backends.torch.model import TorchLayer, TorchModel
from triforce.bench import shapes
from triforce.model.config import Architecture, ModelConfig
from triforce.model.weights import Layer, Weights, numbers

PAGES, SMALL = 24, shapes.ModelShape(32, 48, layers=2, heads=4, kv_heads=2, vocab=50, head_dim=8)


ConfigAndWeights = tuple[ModelConfig, Weights]


@pytest.fixture(scope="module")
def small() -> ConfigAndWeights:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(shapes.SHAPES, "small", SMALL)
        return shapes.parts("small", 300, "float32")


def passes() -> dict[str, tuple[Tensor, Tensor | None, ForwardBatch]]:
    """Return ids, columns to score, and the pass, for each kind of view."""
    draw = torch.Generator().manual_seed(0)
    page_order = (torch.randperm(PAGES, generator=draw).int() + 1).to(DEVICE)
    shared = page_order[:12].view(2, 6)
    ids_23 = torch.randint(50, (2, 3), generator=draw)
    # Each row writes to pages of its own: with two rows at one slot the value would depend on the order of writes.
    new_pages = page_order[12:20].view(2, 1, 4).expand(2, 2, 2, 4)
    of_heads = torch.cat([page_order[torch.randint(12, (2, 2, 2, 3), generator=draw)], new_pages], 3)
    wide = torch.randint(50, (1, 90), generator=draw)
    window = PageTable(page_order[None, :8], [60], [3], 16, 16, 40)
    ragged = PageTable(shared, [70, 5], [3, 1])
    retrieval_table = PageTable(of_heads, [50, 49], [2, 3])
    # New tokens have the same slots in all layers: those of the last units, which all heads share.
    recent = torch.stack((shared[0, 4:], shared[1, :2]))[:, None].expand(2, 2, 2)
    mixed_table = PageTable(torch.cat([of_heads[0, ..., :3], recent], 2), [54, 53], [3, 1])
    return {
        "full": (ids_23, None, ForwardBatch([70, 5], [(2, ragged)], observe=True, return_mass=True)),
        "retrieval": (ids_23, torch.tensor([[0, 1], [2, 0]]), ForwardBatch([90, 91], [(2, retrieval_table)])),
        "mixed": (ids_23, torch.zeros(2, 0).long(), ForwardBatch([70, 5], [(1, ragged), (1, mixed_table)])),
        "streaming": (ids_23[:1], None, ForwardBatch([200], [(2, window)], observe=True)),
        "prefill": (wide, torch.tensor([[89]]), ForwardBatch([20], [(2, PageTable(page_order[None, :8], [20], [90]))])),
        "padded": (ids_23, None, ForwardBatch([70, 5], [(2, ragged)], observe=True, min_shape=(4, 8))),
        "states": (ids_23, None, ForwardBatch([70, 5], [(2, ragged)], min_shape=(4, 8), state_layers=(1,))),
    }  # fmt: skip


def one_row(position: int, units: int, count: int, device: str = "cpu") -> ForwardBatch:
    return ForwardBatch([position], [(2, PageTable(torch.ones(1, units, device=device).int(), [0], [count]))])


def torch_and_triton(small: ConfigAndWeights, name: str) -> list[tuple[ForwardOutput, Tensor]]:
    """Return the outputs of torch and of Triton, and the memory afterwards, from the same noise."""
    config, weights = small
    plain = TorchKV(config, PAGES, "float32", str(DEVICE))
    fast = TritonKV(config, PAGES, "float32", str(DEVICE))
    for memory in (plain.keys_LGSD, plain.values_LGSD):
        memory.copy_(torch.randn(memory.shape, generator=torch.Generator().manual_seed(1)))
    fast.keys_LGSD.copy_(plain.keys_LGSD)
    fast.values_LGSD.copy_(plain.values_LGSD)
    done = []
    for memory, model in ((plain, TorchModel), (fast, TritonModel)):
        ids_BT, at_BJ, batch = passes()[name]
        backend = model(config, weights, str(DEVICE))
        outcome = backend.forward(ids_BT, memory, batch, at_BJ)
        done.append((outcome, torch.stack((memory.keys_LGSD, memory.values_LGSD))))
    return done


@pytest.fixture(autouse=True)
def torch_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triforce.backends.dispatch.native", None)


@pytest.mark.parametrize("name", list(passes()))
def test_cuda_pass_equals_torch(small: ConfigAndWeights, name: str) -> None:
    (reference, kv), (got, fast_kv) = torch_and_triton(small, name)
    _, at, batch = passes()[name]
    for b, count in enumerate(batch.views[0][1].counts):
        real = slice(count) if at is None else slice(None)
        torch.testing.assert_close(got.logits_BJV[b, real], reference.logits_BJV[b, real], atol=2e-5, rtol=1e-5)
        if batch.observe:
            assert got.queries_LBTHD is not None and reference.queries_LBTHD is not None
            queries = got.queries_LBTHD[:, b, :count], reference.queries_LBTHD[:, b, :count]
            torch.testing.assert_close(*queries, atol=2e-5, rtol=1e-5)
        if batch.state_layers:
            assert got.states_SBTC is not None and reference.states_SBTC is not None
            states = got.states_SBTC[:, b, :count], reference.states_SBTC[:, b, :count]
            torch.testing.assert_close(*states, atol=2e-5, rtol=1e-5)
    assert got.logits_BJV.shape == reference.logits_BJV.shape
    if batch.return_mass:
        torch.testing.assert_close(got.mass_LBGU, reference.mass_LBGU, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(fast_kv[:, :, :, 16:], kv[:, :, :, 16:], atol=2e-5, rtol=1e-5)
    assert not torch.equal(kv, torch.zeros_like(kv))


def test_cuda_pass_is_captured_once_per_bucket(small: ConfigAndWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three and four tokens are one shape, with the same buffers. A list of another size is another shape."""
    memory = TritonKV(small[0], PAGES, "float32")
    model = TritonModel(*small, str(DEVICE))
    shapes_run: list[tuple[int, int]] = []
    monkeypatch.setattr(
        cuda_model,
        "run_pass",
        lambda model, kv, inputs, *arguments: shapes_run.append((id(inputs), inputs.shape.width)) or outcome(),
    )

    def outcome() -> ForwardOutput:
        return ForwardOutput(torch.zeros(4, 4, 50), None, None)

    for width in (3, 4, 2):
        model.forward(
            torch.ones(1, width).long(),
            memory,
            ForwardBatch([0], [(2, PageTable(torch.ones(1, 3).int(), [0], [1]))]),
            None,
        )
    assert [width for _, width in shapes_run] == [4, 4, 2]
    assert shapes_run[0] == shapes_run[1]
    model.forward(
        torch.ones(1, 81).long(), memory, ForwardBatch([0], [(2, PageTable(torch.ones(1, 9).int(), [0], [81]))]), None
    )
    assert shapes_run[-1][1] == 81


def test_rotary_tables_grow_with_positions(small: ConfigAndWeights) -> None:
    memory = TritonKV(small[0], PAGES, "float32", str(DEVICE))
    model = TritonModel(*small, str(DEVICE))
    far_position = len(memory.tables_PF[0]) + 5
    model.forward(
        torch.ones(1, 1).long(),
        memory,
        one_row(far_position, 3, 1, DEVICE),
        None,
    )
    assert len(memory.tables_PF[0]) > far_position


def test_cuda_model_is_freed_with_last_user(small: ConfigAndWeights) -> None:
    """The model is freed at once, not by the cycle collector: the next request's KV would not fit beside it."""
    memory = TritonKV(small[0], PAGES, "float32", str(DEVICE))
    model = TritonModel(*small, str(DEVICE))
    model.forward(
        torch.ones(1, 1).long(),
        memory,
        one_row(0, 3, 1, DEVICE),
        None,
    )
    keys = weakref.ref(memory.keys_LGSD)
    gc.disable()
    try:
        del memory
        assert keys() is None
    finally:
        gc.enable()


def a_layer(draw: torch.Generator) -> tuple[ModelConfig, Layer]:
    """Return a layer with all optional parts of the families: biases, and norms of queries and keys."""
    config, weights = shapes.parts("small", 300, "float32")
    D = SMALL.head_dim
    Q = 32
    P = 16
    C = SMALL.hidden
    I = SMALL.intermediate  # noqa: E741
    layer = weights.layers[0]
    named = {
        f.name: torch.randn(getattr(layer, f.name).shape, generator=draw).to(DEVICE)
        for f in fields(layer)
        if isinstance(getattr(layer, f.name), np.ndarray)
    }
    sizes = dict(q_bias_Q=Q, k_bias_P=P, v_bias_P=P, q_norm_D=D, k_norm_D=D)
    sizes |= dict(o_bias_C=C, gate_bias_I=I, up_bias_I=I, down_bias_C=C)
    named |= {name: torch.randn(size, generator=draw).to(DEVICE) for name, size in sizes.items()}
    parts = Architecture(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm="head")
    assert parts.has_plain_layers
    return replace(config, architecture=parts), Layer(**named)


def test_joined_products_equal_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product gives q, k and v, and another gives gate and up."""
    monkeypatch.setitem(shapes.SHAPES, "small", SMALL)
    config, layer = a_layer(torch.Generator().manual_seed(3))
    plain = TorchLayer(config, layer)
    products = list[int]()
    x_NC = torch.randn(5, SMALL.hidden, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    single_outputs = *plain.qkv(x_NC), plain.gate(x_NC)
    fast = TritonLayer(config, layer)
    product = F.linear
    monkeypatch.setattr(F, "linear", lambda *arguments: products.append(1) or product(*arguments))
    got = *fast.qkv(x_NC), fast.gate(x_NC)
    assert len(products) == 2
    for joined_output, single_output in zip(got, single_outputs, strict=True):
        torch.testing.assert_close(joined_output, single_output, atol=2e-5, rtol=1e-5)


def test_joined_matrices_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer's own matrices become views of the joined ones."""
    monkeypatch.setitem(shapes.SHAPES, "small", SMALL)
    config, layer = a_layer(torch.Generator().manual_seed(3))
    original_weights = [
        weight.clone() for weight in (layer.q_proj_QC, layer.up_proj_IC, layer.v_bias_P) if isinstance(weight, Tensor)
    ]
    TritonLayer(config, layer)
    joined_weights = layer.q_proj_QC, layer.k_proj_PC, layer.v_proj_PC, layer.gate_proj_IC, layer.up_proj_IC
    addresses = [numbers(weight).untyped_storage().data_ptr() for weight in joined_weights]
    assert len(set(addresses[:3])) == len(set(addresses[3:])) == 1 and addresses[0] != addresses[3]
    assert all(map(torch.equal, original_weights, map(numbers, (layer.q_proj_QC, layer.up_proj_IC, layer.v_bias_P))))  # type: ignore[arg-type]


def by_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a product that sums each number in one order for every row, as a GPU does for one shape."""
    y = torch.zeros(len(x), len(weight))
    for j in range(x.shape[1]):
        y += x[:, j, None] * weight[None, :, j]
    return y


@pytest.mark.skipif(DEVICE.type != "cpu", reason="products are made up here")
def test_strict_bits_of_joined_products_are_those_of_single_tokens(
    small: ConfigAndWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of one shape, of three tokens and of one each, give a token the same logits beside any tokens."""
    monkeypatch.setattr(F, "linear", by_row)
    monkeypatch.setattr(np, "matmul", by_the_term)
    ids = [7, 11, 13]
    logits_by_kind = []
    for widths in ([3], [1, 1, 1]):
        memory = TritonKV(small[0], PAGES, "float32", str(DEVICE))
        at = 0
        logits = []
        model = TritonModel(*small, str(DEVICE))
        for width in widths:
            lists = PageTable(torch.arange(1, 4, device=DEVICE).int()[None], [20 + at], [width])
            batch = ForwardBatch([20 + at], [(2, lists)], min_shape=(2, 4))
            output = model.forward(torch.tensor([ids[at : at + width]]), memory, batch, None)
            logits.append(output.logits_BJV[0])
            at += width
        logits_by_kind.append(torch.cat(logits))
    assert torch.equal(*logits_by_kind)

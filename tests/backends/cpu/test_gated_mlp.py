"""Gate and up projections of two types, on every level. Shape suffixes: N rows, C hidden size, I MLP size."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from tests.helpers.gguf_blocks import Blocks, as_bytes, random_blocks
from tests.helpers.paged_kv import native
from tests.helpers.random_tensors import normal

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("level")

EPS = 1e-5


def gated_mlp(gate: Blocks, up: Blocks, x_NC: Tensor, bits: int = 0, biases_2I: Iterable[Tensor] = ()) -> Tensor:
    """Return all that is written, the zeros behind the outputs included."""
    mlp = native.GatedMlp(torch.ones(x_NC.shape[1]), gate, up, *biases_2I, eps=EPS, bits=bits)
    out_NI = torch.full((len(x_NC), mlp.stride), torch.nan, dtype=torch.bfloat16 if gate.narrow else torch.float32)
    mlp.forward(x_NC.contiguous(), out_NI)
    return out_NI


def as_kind(weight: Blocks, kind: str) -> Blocks:
    """Return the same numbers in a type that can represent all of them."""
    return Blocks(kind, torch.from_numpy(as_bytes(weight.weights_MK().float().numpy(), kind)), weight.narrow)


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize(("size", "C"), [(1, 16), (50, 100), (2100, 33), (700, 256)])
def test_gate_and_up_of_two_types_have_bits_of_one(size: int, C: int, narrow: bool) -> None:
    """Halves stay halves, and are float32 where gate and up lie in one matrix."""
    gate, up = (random_blocks("F16", size, C, narrow, seed=seed, size=C**-0.5) for seed in (0, 1))
    x_NC = normal(20, C)
    biases_2I = normal(2, size, seed=2)
    joined = gated_mlp(gate, up, x_NC, biases_2I=biases_2I)
    assert not torch.equal(joined, gated_mlp(gate, up, x_NC))
    assert torch.equal(joined[:, size:], torch.zeros_like(joined[:, size:])) and joined[:, :size].isfinite().all()
    for two in ((as_kind(gate, "F32"), up), (gate, as_kind(up, "F32"))):
        assert torch.equal(gated_mlp(*two, x_NC, biases_2I=biases_2I), joined)


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q8_0", "F16"), ("F32", "Q5_1"), ("BF16", "Q4_0")])
def test_gate_and_up_of_two_types_are_near_float64(kinds: tuple[str, str]) -> None:
    size, C = 100, 512
    gate, up = (random_blocks(kind, size, C, True, size=0.004) for kind in kinds)
    x_NC = normal(16, C)
    y_NC = x_NC.double() / (x_NC.double().square().mean(1, keepdim=True) + EPS).sqrt()
    gate_NI, up_NI = (y_NC @ weight.weights_MK().T for weight in (gate, up))
    exact_NI = gate_NI * gate_NI.sigmoid() * up_NI
    error_NI = gated_mlp(gate, up, x_NC)[:, :size].double() - exact_NI
    assert error_NI.square().mean().sqrt() < 2.0**-5 * exact_NI.square().mean().sqrt()


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("BF16", "F16"), ("F32", "Q5_1")])
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_gate_and_up_of_two_types_keep_the_law(kinds: tuple[str, str], bits: int) -> None:
    """The bits of a row depend on that row alone, and the bits of some outputs on those outputs alone."""
    gate, up = (random_blocks(kind, 1600, 256, True, size=0.004) for kind in kinds)
    x_NC = normal(110, 256)
    batch_output = gated_mlp(gate, up, x_NC, bits)
    for threads in (1, 2):
        native.set_threads(threads)
        for rows in (slice(0, 1), slice(5, 12), slice(100, 101), slice(0, 110)):
            assert torch.equal(gated_mlp(gate, up, x_NC[rows], bits), batch_output[rows])
    part = [Blocks(weight.kind, weight.blocks[32:80].contiguous(), True) for weight in (gate, up)]
    assert torch.equal(gated_mlp(*part, x_NC, bits), batch_output[:, 32:80])


def test_gate_and_up_of_two_shapes_raise() -> None:
    gate, up = random_blocks("Q4_K", 32, 256, True), random_blocks("Q6_K", 48, 256, True)
    with pytest.raises(ValueError, match=r"up_proj must be \(32, 256\), is \(48, 256\)"):
        native.GatedMlp(torch.ones(256), gate, up, eps=EPS)

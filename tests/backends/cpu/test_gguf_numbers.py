"""Products with numbers of GGUF files, on every level. Shape suffixes: N rows, K inputs, M outputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.gguf_blocks import NUMBERS, Blocks, as_bytes, random_blocks
from tests.helpers.paged_kv import native
from tests.helpers.random_tensors import normal

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("level")

SHAPES = [(1, 1), (16, 2), (17, 33), (40, 100), (70, 352), (200, 1500), (72, 2600)]
WIDE = ("F32", "F16")
"""Types whose products take bfloat16 inputs as float32."""


def linear(weight: Blocks | Tensor, x_NK: Tensor) -> Tensor:
    y_NM = torch.full((len(x_NK), len(weight if isinstance(weight, Tensor) else weight.blocks)), torch.nan)
    native.Matrix(weight).linear(x_NK, y_NM)
    return y_NM


def bound(weight_MK: Tensor, x_NK: Tensor) -> Tensor:
    """Return the bound of one chain of sums: at most two roundings for each product."""
    return 2 * x_NK.shape[1] * 2.0**-24 * (x_NK.double().abs() @ weight_MK.abs().T)


@pytest.mark.parametrize(("M", "K"), SHAPES)
@pytest.mark.parametrize("kind", WIDE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gguf_number_product_error_within_bound(kind: str, M: int, K: int, dtype: torch.dtype) -> None:
    weight, x_16K = random_blocks(kind, M, K, dtype == torch.bfloat16), normal(16, K, seed=1).to(dtype)
    w_MK = weight.weights_MK()
    for N in range(1, 17):
        x_NK = x_16K[:N].contiguous()
        error = (linear(weight, x_NK) - x_NK.double() @ w_MK.T).abs()
        assert bool((error <= bound(w_MK, x_NK)).all()), N


@pytest.mark.parametrize("kind", WIDE)
def test_gguf_numbers_rounded_to_bfloat16_miss_bound(kind: str) -> None:
    """Negative control: weights or inputs that lose bits miss the bound above."""
    weight = random_blocks(kind, 40, 352, True)
    x_NK = normal(9, 352, seed=1)
    w_MK = weight.weights_MK()
    some_M = weight.weights_MK().any(1)
    for w, x in ((w_MK.bfloat16().double(), x_NK.bfloat16()), (w_MK, x_NK)):
        error = (linear(weight, x.bfloat16()) - x.double() @ w.T).abs()
        assert bool((error > bound(w, x)).float()[:, some_M].mean() > 0.5)


@pytest.mark.parametrize(("M", "K"), SHAPES)
@pytest.mark.parametrize("kind", WIDE)
def test_gguf_number_product_has_bits_of_float32_matrix(kind: str, M: int, K: int) -> None:
    """Weights of two bytes, and inputs of two bytes, count as the float32 that they are equal to."""
    weight = random_blocks(kind, M, K, True)
    x_NK = normal(25, K, seed=1).bfloat16()
    assert torch.equal(linear(weight, x_NK), linear(weight.weights_MK().float(), x_NK.float()))


def test_gguf_bfloat16_is_a_bfloat16_matrix() -> None:
    weight, x_NK = random_blocks("BF16", 40, 352, True), normal(9, 352, seed=1).bfloat16()
    assert torch.equal(linear(weight, x_NK), linear(weight.weights_MK().bfloat16(), x_NK))


@pytest.mark.parametrize("kind", WIDE)
def test_gguf_number_row_bits_independent_of_batch(kind: str) -> None:
    weight = random_blocks(kind, 100, 2600, True)
    x_NK = normal(230, 2600).bfloat16()
    batch_output = linear(weight, x_NK)
    for threads in (1, 2):
        native.set_threads(threads)
        assert torch.equal(batch_output, linear(weight, x_NK))
        for N in range(1, 20):
            assert torch.equal(batch_output[N : 2 * N], linear(weight, x_NK[N : 2 * N])), N


@pytest.mark.parametrize("kind", NUMBERS)
def test_gguf_number_part_of_outputs_has_bits_of_whole(kind: str) -> None:
    """Ranks may cut the outputs."""
    weight = random_blocks(kind, 96, 512, True)
    x_NK = normal(3, 512).bfloat16()
    part = Blocks(kind, weight.blocks[32:80].contiguous(), True)
    assert torch.equal(linear(weight, x_NK)[:, 32:80], linear(part, x_NK))


@pytest.mark.parametrize("kind", NUMBERS)
def test_gguf_number_rows_equal_library(kind: str) -> None:
    """Rows are the library's, packed in memory and as the file has them."""
    weight = random_blocks(kind, 37, 100, True)
    ids = torch.tensor([0, 36, 5, 18, 5])
    packed = torch.empty(5, 100)
    read = torch.empty(5, 100)
    native.Matrix(weight).rows(ids, packed)
    native.Embedding(weight).rows(ids, read)
    assert torch.equal(packed.double(), weight.weights_MK()[ids]) and torch.equal(packed, read)


def test_all_finite_halves_are_multiplied_exactly() -> None:
    """Subnormal halves are exact, too."""
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves_M1 = np.repeat(bits[np.isfinite(bits)][:, None], 2, 1)
    weight = Blocks("F16", torch.from_numpy(halves_M1.view(np.uint8)), True)
    y_NM = linear(weight, torch.tensor([[1, 0], [0, -2]], dtype=torch.bfloat16))
    exact_M = torch.from_numpy(halves_M1[:, 0].astype(np.float32))
    assert torch.equal(y_NM[0], exact_M) and torch.equal(y_NM[1], -2 * exact_M)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", WIDE)
def test_gguf_number_copies_are_those_of_float32(kind: str, bits: int) -> None:
    """Copies of fewer bits, for lower tiers, are those of float32; their products round bfloat16 inputs."""
    weight = random_blocks(kind, 37, 320, True)
    x_NK = normal(9, 320, seed=1).bfloat16()
    ours, theirs = (native.Matrix(w, bits=bits) for w in (weight, weight.weights_MK().float()))
    y_NM = torch.empty(9, 37)
    z_NM = torch.empty(9, 37)
    ours.linear(x_NK, y_NM), theirs.linear(x_NK.float(), z_NM)
    assert ours.bytes == theirs.bytes < 37 * 320 * 2 and torch.equal(y_NM, z_NM)


@pytest.mark.parametrize("kind", NUMBERS)
def test_gguf_number_nonfinite_weights_raise(kind: str) -> None:
    for value in (np.nan, np.inf, -np.inf):
        for at in ((0, 0), (16, 99), (7, 31)):
            numbers = np.ones((17, 100), np.float32)
            numbers[at] = value
            weight = Blocks(kind, torch.from_numpy(as_bytes(numbers, kind)), True)
            for bits in (0, 8):
                with pytest.raises(ValueError, match="weight holds NaN or Inf"):
                    native.Matrix(weight, bits=bits)


def test_gguf_number_nonfinite_inputs_stay_nonfinite() -> None:
    weight = Blocks("F16", torch.from_numpy(as_bytes(np.eye(16, dtype=np.float32), "F16")), True)
    for value in (torch.nan, torch.inf):
        x_NK = torch.zeros(2, 16, dtype=torch.bfloat16)
        x_NK[0, 3] = value
        y_NM = linear(weight, x_NK)
        assert not y_NM[0, 3].isfinite() and torch.equal(y_NM[1], torch.zeros(16))


def test_gguf_number_bad_bytes_raise() -> None:
    good = random_blocks("F16", 16, 64, True)
    shifted = torch.zeros(16 * 128 + 1, dtype=torch.uint8)[1:].view(16, 128)
    for bad, message in [
        (Blocks("F64", good.blocks), "no kernels for weights of type F64"),
        (Blocks("F32", good.blocks[:, :126].contiguous()), "whole numbers"),
        (Blocks("F16", shifted), "whole numbers, aligned"),
        (Blocks("F16", good.blocks.int()), "weight must be uint8"),
        (Blocks("F16", good.blocks[:0]), "weight is empty"),
        (Blocks("F32", good.blocks[0]), "weight must be uint8"),
    ]:
        with pytest.raises(ValueError, match=message):
            native.Matrix(bad)

"""Products with weights of GGUF types, on every level. Shape suffixes: N rows, K inputs, M outputs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.gguf_blocks import KINDS, NUMBERS, Blocks, inputs_of_block, random_blocks
from tests.helpers.paged_kv import native
from tests.helpers.random_tensors import normal

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("level")

GROUP = 32
INPUTS = {"int16": 32767, "int8": 127}
"""Largest code of an input, by the type of inputs."""
DATA = Path(__file__).parents[3] / "docs" / "data" / "gguf_types.toml"


def linear(weight: Blocks, x_NK: Tensor, inputs: str = "int16") -> Tensor:
    y_NM = torch.full((len(x_NK), len(weight.blocks)), torch.nan)
    x_NK = x_NK.to(torch.bfloat16 if weight.narrow else torch.float32)
    native.Matrix(weight).linear(x_NK, y_NM, int8_inputs=inputs == "int8")
    return y_NM


def rounded(x_NK: Tensor, inputs: str = "int16") -> Tensor:
    """Return each group of a row as multiples of its scale, in float64."""
    x = x_NK.float().unflatten(1, (-1, GROUP))
    scale = x.abs().amax(2, keepdim=True) / INPUTS[inputs]
    return ((x * torch.where(scale > 0, 1 / scale, 0)).round().double() * scale.double()).flatten(1)


def test_low_bit_bytes_are_as_documented() -> None:
    types = tomllib.loads(DATA.read_text(encoding="utf-8"))["types"]
    assert tuple(row["name"] for row in types) == (*NUMBERS, *KINDS)
    for row in types:
        weight = random_blocks(row["name"], 64, 2048)  # 512 times 256
        assert weight.blocks.numel() == 512 * row["file"] and native.Matrix(weight).bytes == 512 * row["packed"]


@pytest.mark.parametrize("kind", KINDS)
def test_low_bit_rows_equal_library(kind: str) -> None:
    """All outputs are read back, from the packed matrix and from the file; the last block may lack rows."""
    for M, blocks in ((1, 1), (15, 3), (16, 2), (37, 5)):
        K = blocks * inputs_of_block(kind)
        weight = random_blocks(kind, M, K)
        for table in (native.Matrix(weight), weight):
            out = torch.empty(M, K)
            native.Embedding(table).rows(torch.arange(M), out)
            assert torch.equal(out.double(), weight.weights_MK()), (M, K)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_low_bit_product_error_within_bound(kind: str, narrow: bool, inputs: str) -> None:
    """Sums of groups are exact, and each group adds at most four roundings to the chain of floats."""
    K = 3 * 256 if inputs_of_block(kind) > GROUP else 11 * GROUP
    for N in (1, 2, 5, 16, 100):
        weight, x_NK = random_blocks(kind, 70, K, narrow), normal(N, K, seed=N)
        x_NK = x_NK.bfloat16().float() if narrow else x_NK
        w_MK, exact_NK = weight.weights_MK(), rounded(x_NK, inputs)
        error = (linear(weight, x_NK, inputs) - exact_NK @ w_MK.T).abs()
        terms = exact_NK.abs() @ (w_MK.abs() + parts_that_cancel(weight)).T
        assert bool((error <= 4 * K / GROUP * 2.0**-24 * terms).all()), N


def parts_that_cancel(weight: Blocks) -> Tensor:
    """Return the largest magnitude of codes and of minima that cancel, float64 (M, 1)."""
    return weight.weights_MK().abs().amax(1, keepdim=True)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_low_bit_row_bits_independent_of_batch(kind: str, inputs: str) -> None:
    weight = random_blocks(kind, 100, 2560)
    x_NK = normal(230, 2560)
    batch_output = linear(weight, x_NK, inputs)
    for threads in (1, 2):
        native.set_threads(threads)
        assert torch.equal(batch_output, linear(weight, x_NK, inputs))
        for N in range(1, 20):
            assert torch.equal(batch_output[N : 2 * N], linear(weight, x_NK[N : 2 * N], inputs)), N


@pytest.mark.parametrize("kind", KINDS)
def test_low_bit_part_of_outputs_has_bits_of_whole(kind: str) -> None:
    """Ranks may cut the outputs."""
    weight = random_blocks(kind, 96, 512)
    x_NK = normal(3, 512)
    part = Blocks(kind, weight.blocks[32:80].contiguous())
    assert torch.equal(linear(weight, x_NK)[:, 32:80], linear(part, x_NK))


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_low_bit_extreme_codes_are_exact(kind: str, inputs: str) -> None:
    """All bits are set and inputs are at their largest: saturating words would show here."""
    weight = random_blocks(kind, 16, 512)
    blocks = weight.blocks.view(16, -1, weight.blocks.shape[1] // (512 // inputs_of_block(kind)))
    halves = blocks.clone()
    blocks.fill_(255 if kind != "Q8_0" else 128)
    for at in (208,) if kind == "Q6_K" else (0, 2) if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,):
        blocks[..., at : at + 2] = halves[..., at : at + 2]
    for sign in (1, -1):
        x_NK = torch.full((9, 512), 127.0 * sign)
        error = (linear(weight, x_NK, inputs) - x_NK.double() @ weight.weights_MK().T).abs()
        assert bool((error <= 64 * 2.0**-24 * 512 * 127 * 2 * parts_that_cancel(weight).T).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int4_copies_are_within_half_a_step(dtype: torch.dtype) -> None:
    """A group spans 15 steps. Scale and minimum are halves, which moves the last codes by 15 roundings."""
    w_MK = normal(37, 320).to(dtype)
    copy_MK = torch.empty(37, 320)
    w_MK[3] = 0.25
    native.Matrix(w_MK, bits=4).rows(torch.arange(37), copy_MK)
    groups = w_MK.float().unflatten(1, (-1, GROUP))
    spans = groups.amax(2) - groups.amin(2)
    largest = groups.abs().amax(2)
    error = (copy_MK - w_MK.float()).unflatten(1, (-1, GROUP)).abs().amax(2)
    assert bool((error <= spans / 30 + 3 * 2.0**-11 * largest).all()) and bool((error.amax() > spans.amin() / 60).all())
    assert torch.equal(copy_MK[3], w_MK[3].float())


def test_int4_product_is_that_of_its_copies() -> None:
    """The product is that of rounded inputs and the copies, to the last digits. Matrices of other widths are int8."""
    w_MK = normal(70, 352)
    x_NK = normal(9, 352, seed=1)
    copy_MK = torch.empty(70, 352)
    y_NM = torch.empty(9, 70)
    native.Matrix(w_MK, bits=4).rows(torch.arange(70), copy_MK)
    native.Matrix(w_MK, bits=4).linear(x_NK, y_NM)
    assert ((y_NM - rounded(x_NK) @ copy_MK.double().T).abs() < 1e-5 * 352**0.5 * 3).all()
    odd_MK = w_MK[:, :340].contiguous()
    copies = [torch.empty(70, 340), torch.empty(70, 340)]
    for bits, copy in zip((4, 8), copies, strict=True):
        native.Matrix(odd_MK, bits=bits).rows(torch.arange(70), copy)
    assert torch.equal(*copies)


def test_low_bit_nonfinite_inputs_stay_nonfinite() -> None:
    weight = random_blocks("Q4_1", 16, 64)
    for value in (torch.nan, torch.inf):
        x_NK = torch.zeros(2, 64)
        x_NK[0, 3] = value
        y_NM = linear(weight, x_NK)
        assert not y_NM[0].isfinite().any() and torch.equal(y_NM[1], torch.zeros(16))


def test_low_bit_nonfinite_scales_raise() -> None:
    for kind in KINDS:
        weight = random_blocks(kind, 16, 512)
        weight.blocks[3, 208:210] = 255  # a half-precision scale of Q6_K, and of other types where a block begins there
        at = 208 if kind == "Q6_K" else 0
        weight.blocks[3, at : at + 2] = torch.from_numpy(np.array([np.inf], np.float16).view(np.uint8))
        with pytest.raises(ValueError, match="weight holds NaN or Inf"):
            native.Matrix(weight)


def test_low_bit_bad_blocks_raise() -> None:
    good = random_blocks("Q4_1", 16, 64)
    for bad, message in [
        (Blocks("Q2_K", good.blocks), "no kernels for weights of type Q2_K"),
        (Blocks("Q4_1", good.blocks[:, :30].contiguous()), "whole blocks"),
        (Blocks("Q4_1", good.blocks.int()), "weight must be uint8"),
        (Blocks("Q4_1", good.blocks[:0]), "weight is empty"),
        (Blocks("Q4_1", good.blocks[0]), "weight must be uint8"),
    ]:
        with pytest.raises(ValueError, match=message):
            native.Matrix(bad)

"""Checks of weights of GGUF types in the Triton kernels, which mutants must fail. N tokens, M outputs, K inputs."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.helpers.cuda.scene import DEVICE
from tests.helpers.gguf_blocks import Blocks, inputs_of_block, random_blocks
from triforce.backends.cuda.packed_weight import PackedWeight, packed
from triforce.backends.cuda.triton.weight_tiles import PROGRAMS, rows_of, times
from triforce.model.weights import QuantizedWeight

M = 40
"""More than a tile, and no whole number of them."""


def given(kind: str, K: int) -> tuple[Blocks, PackedWeight]:
    """Random blocks, and what the kernels have of them."""
    blocks = random_blocks(kind, M, K)
    weight = packed(QuantizedWeight(kind, blocks.blocks, K), DEVICE)
    assert isinstance(weight, PackedWeight)
    return blocks, weight


def sizes(kind: str) -> dict[int, int]:
    """Inputs of several eights of groups, of one that is not whole, where a type allows that, and of an odd number.

    With each, the programs that a matrix should have: so inputs are one part, parts of one eight, and of two but for
    the last.
    """
    return {512: 1, 256 if inputs_of_block(kind) == 256 else 288: PROGRAMS, 1280: 6}


def tokens(N: int, K: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(N)).to(DEVICE, dtype)


def check_numbers(kind: str) -> None:
    """Rows are those of the format's own library, but for the order in which float32 is rounded."""
    for K in sizes(kind):
        blocks, weight = given(kind, K)
        wanted_MK = blocks.weights_MK()
        order = torch.randperm(M, generator=torch.Generator().manual_seed(1))
        got = rows_of(weight, order.to(DEVICE), torch.float32).cpu()
        torch.testing.assert_close(
            got, wanted_MK[order].float(), rtol=2**-21, atol=2**-22 * float(wanted_MK.abs().max())
        )


def check_product(kind: str, N: int) -> None:
    """Products with a bias, and with weights as they are; of bfloat16, weights and the result are rounded to it."""
    for dtype, (K, programs) in product((torch.float32, torch.bfloat16), sizes(kind).items()):
        blocks, weight = given(kind, K)
        x_NK = tokens(N, K, dtype)
        bias_M = torch.linspace(-1, 1, M, device=DEVICE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(times.__globals__, "PROGRAMS", programs)  # a mutant's are its own
            got = times(x_NK, weight, bias_M).cpu().double()
            w_MK = blocks.weights_MK()
        exact = x_NK.cpu().double() @ w_MK.T + bias_M.cpu().double()
        magnitudes = x_NK.cpu().double().abs() @ w_MK.abs().T
        of_result, of_weights = (2**-7, 2**-9) if dtype == torch.bfloat16 else (2**-22, 2**-18)
        assert got.shape == (N, M) and bool(
            ((got - exact).abs() <= of_result * exact.abs() + of_weights * magnitudes).all()
        )

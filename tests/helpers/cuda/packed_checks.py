"""Checks of GGUF weights in the Triton kernels, which mutants must fail. N tokens, M outputs, K inputs."""

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
"""Outputs: more than a tile, and no multiple of one."""


def given(kind: str, K: int) -> tuple[Blocks, PackedWeight]:
    """Return random blocks, and the packed weight that kernels read."""
    blocks = random_blocks(kind, M, K)
    weight = packed(QuantizedWeight(kind, blocks.blocks.numpy(), K), DEVICE)
    assert isinstance(weight, PackedWeight)
    return blocks, weight


def sizes(kind: str) -> dict[int, int]:
    """Return numbers of inputs: several eights of groups, a partial one where a type allows it, and an odd number.

    The value of each is the expected number of programs: so inputs are one part, parts of one eight, and parts of two
    eights but for the last.
    """
    return {512: 1, 256 if inputs_of_block(kind) == 256 else 288: PROGRAMS, 1280: 6}


def tokens(N: int, K: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(N)).to(DEVICE, dtype)


def check_numbers(kind: str) -> None:
    """Check that rows equal those of the format's own library, but for the order of float32 roundings."""
    for K in sizes(kind):
        blocks, weight = given(kind, K)
        wanted_MK = blocks.weights_MK()
        order = torch.randperm(M, generator=torch.Generator().manual_seed(1))
        got = rows_of(weight, order.to(DEVICE), torch.float32).cpu()
        torch.testing.assert_close(
            got, wanted_MK[order].float(), rtol=2**-21, atol=2**-22 * float(wanted_MK.abs().max())
        )


def check_product(kind: str, N: int) -> None:
    """Check products with a bias and with weights as they are. For bfloat16, weights and results are rounded to it."""
    for dtype, (K, programs) in product((torch.float32, torch.bfloat16), sizes(kind).items()):
        blocks, weight = given(kind, K)
        x_NK = tokens(N, K, dtype)
        bias_M = torch.linspace(-1, 1, M, device=DEVICE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(times.__globals__, "PROGRAMS", programs)  # a mutant has its own values
            got = times(x_NK, weight, bias_M).cpu().double()
            w_MK = blocks.weights_MK()
        exact = x_NK.cpu().double() @ w_MK.T + bias_M.cpu().double()
        magnitudes = x_NK.cpu().double().abs() @ w_MK.abs().T
        of_result, of_weights = (2**-7, 2**-9) if dtype == torch.bfloat16 else (2**-22, 2**-18)
        assert got.shape == (N, M) and bool(
            ((got - exact).abs() <= of_result * exact.abs() + of_weights * magnitudes).all()
        )

"""Attention at the sizes of real models, with a GPU's blocks and splits, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.cuda.scene import Case, Scene
from tests.helpers.slow_parameters import slow
from triforce.backends.cuda.splits import SHARED_UNITS
from triforce.backends.cuda.triton.attention import tile_of

BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-8 + 2**-9}
MASS = 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
def test_triton_attention_over_thousands_of_keys_equals_float64(dtype: torch.dtype) -> None:
    """Groups of four (Llama-3.1-8B) and eight, heads of 128, several splits, and rows beyond one program's."""
    for group, T, keys, by_head in ((8, 9, 2100, False), (4, 1, 2 * SHARED_UNITS + 1, False), (8, 1, 1030, True)):
        case = Case(
            D=128, G=1, group=group, T=T, starts=[keys - T], counts=[T], by_head=by_head, sinks=0, window=0,
            turned=False, dtype=dtype,
        )  # fmt: skip
        assert keys > SHARED_UNITS and (T == 1 or T * group > tile_of(dtype.itemsize, 128, T * group).rows)
        scene = Scene(case)
        attn_out, mass = scene.by_kernel(split=None)
        reference, wanted_mass = scene.by_the_book()
        assert scene.error(attn_out, reference) <= BOUND[dtype]
        torch.testing.assert_close(mass.double(), wanted_mass, atol=MASS, rtol=MASS)


def test_triton_attention_of_heads_of_256_equals_float64() -> None:
    """Programs for heads of 256 hold fewer rows and keys."""
    case = Case(D=256, G=1, group=8, T=5, starts=[590], counts=[5], by_head=False, sinks=0, window=0, turned=False)
    for dtype in BOUND:
        case.dtype = dtype
        scene = Scene(case)
        assert scene.error(scene.by_kernel(split=None)[0], scene.by_the_book()[0]) <= BOUND[dtype]

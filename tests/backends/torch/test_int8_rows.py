"""Rows of int8 KV in torch: multiples of a scale that are nearest to the numbers, read alike by both readers."""

import numpy as np
import pytest
import torch
from torch import Tensor

from triforce.arrays import to_host
from triforce.backends.torch.int8_rows import numbers, rounded
from triforce.model import kv_rows


@pytest.mark.parametrize(
    "x", [torch.randn(5, 3, 64), torch.zeros(1, 16), torch.full((2, 16), 1e-30)], ids=lambda x: str(tuple(x.shape))
)
def test_rounded_rows_are_nearest_multiples(x: Tensor) -> None:
    rows = rounded(x)
    back = numbers(rows)
    scale = rows[..., -2:].contiguous().view(torch.bfloat16).float()
    assert np.array_equal(kv_rows.numbers(to_host(rows)), to_host(back))
    assert (rows[..., :-2].abs() <= 127).all()
    assert ((back - x).abs() <= scale * 0.5001).all()
    assert (scale * 127 >= x.abs().amax(-1, keepdim=True) * (1 - 1e-6)).all()

"""Fixtures `dtype` and `level`: a test that asks for one, or is marked to use it, runs at each level of the kernels.

`dtype` runs each storage type, too, and `dtype_name` is that type's name.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.helpers.paged_kv import at_level, usable
from triforce.arrays import DType


@pytest.fixture(params=usable(), ids=lambda use: f"{use[0]}-{str(use[1])[6:]}")
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Yield each storage type at each level of the kernels."""
    level, dtype = request.param
    with at_level(level):
        yield dtype


@pytest.fixture
def dtype_name(dtype: torch.dtype) -> DType:
    return str(dtype).removeprefix("torch.")


@pytest.fixture(params=sorted({level for level, _ in usable()}))
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield each level of the kernels, set during the test."""
    with at_level(request.param):
        yield request.param

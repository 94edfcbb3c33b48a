"""A test that asks for `dtype`, or is marked to use it, runs at each level of the kernels with each storage type."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.helpers.paged_kv import native, usable


@pytest.fixture(params=usable(), ids=lambda use: f"{use[0]}-{str(use[1])[6:]}")
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The storage type, with the kernels at their level meanwhile."""
    before = native.level()
    native.use(request.param[0])
    yield request.param[1]
    native.use(before)

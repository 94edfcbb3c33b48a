"""Sizes in bytes, as users write them."""

from __future__ import annotations

import pytest

from triforce.errors import RequestError
from triforce.interface.quantities import size_of


def test_byte_sizes_are_parsed() -> None:
    assert [size_of(text) for text in ("512MiB", "2GiB", "1.5g", "100", "1MB", 7)] == [
        512 << 20, 2 << 30, 3 << 29, 100, 10**6, 7
    ]  # fmt: skip


SIZES_BEYOND = ["9" * 400, f"{'9' * 5000}TiB", 10**5000, 1 << 63, "", "-1", "\N{KELVIN SIGN}", "1e9"]


@pytest.mark.parametrize("size", SIZES_BEYOND, ids=lambda size: type(size).__name__)
def test_byte_sizes_beyond_files_are_refused(size: str | int) -> None:
    with pytest.raises(RequestError, match="disk_cache_size") as refusal:
        size_of(size, "disk_cache_size")
    assert len(str(refusal.value)) < 200

"""Layers with a window that keep nothing behind it, and short passes; what their rows give back is spoilt at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from triforce.engine.tier_builder import SharedKV
from triforce.kvcache import PAGE, PagePool, window_pages
from triforce.kvcache.views import full

CHUNK = 32
SPOILT = 90
"""Finite, as what a window hides has weight 0 on the torch path."""


@contextmanager
def narrow(slack: int = 0) -> Iterator[None]:
    """Engines that are made meanwhile keep just a window and `slack` tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_pages, "SLACK", slack)
        patch.setattr(full, "PREFILL_ON_CPU", CHUNK)
        patch.setattr(PagePool, "cover", spoiling(PagePool.cover))
        yield


@contextmanager
def whole() -> Iterator[None]:
    """Engines that are made meanwhile keep KV of all tokens in all layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedKV, "_windows", lambda _: None)
        yield


def spoiling(cover: Any) -> Any:
    def covered(pool: PagePool, *arguments: Any) -> None:
        cover(pool, *arguments)
        if pool.windows and (free := pool.windows.store.free):
            slots_N = (torch.tensor(free)[:, None] * PAGE + torch.arange(PAGE)).flatten()
            shape = pool.config.kv_heads, len(slots_N), pool.config.row_size
            rows_GND = torch.full(shape, SPOILT).to(pool.dtype)
            for layer in (n for n, apart in enumerate(pool.apart) if apart):
                pool.kv.write(layer, slots_N, rows_GND, rows_GND)

    return covered

"""Layers that keep only their windows, and short passes. Freed pages are overwritten at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.engine_scene import TOKENS, alone
from tests.helpers.family_models import SIZES, family_model
from tests.helpers.tiny_checkpoint import save, tiny_model
from tests.helpers.tiny_llm import CONTEXT
from triforce.engine.tier_builder import SharedKV
from triforce.kvcache import PagePool
from triforce.kvcache import pool as kvcache_pool
from triforce.kvcache.pool import slots_of_pages
from triforce.kvcache.views import full
from triforce.llm import LLM

CHUNK = 32
SLACK = 40
PLAYED = "gemma-3"
SPOILT = 90
"""Value of overwritten KV: finite, as hidden keys have weight 0 on the torch path."""


@contextmanager
def narrow(slack: int = 0) -> Iterator[None]:
    """Let engines created within the block keep just a window and `slack` tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvcache_pool, "SLACK", slack)
        patch.setattr(full, "PREFILL_CHUNK_ON_CPU", CHUNK)
        patch.setattr(PagePool, "prepare_pass", spoiling(PagePool.prepare_pass))
        yield


@contextmanager
def whole() -> Iterator[None]:
    """Let engines created within the block keep KV of all tokens in all layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedKV, "_windows", lambda _: None)
        yield


def spoiling(cover: Any) -> Any:
    def covered(pool: PagePool, *arguments: Any) -> None:
        cover(pool, *arguments)
        if pool.windows and (free := pool.windows.allocator.free):
            slots_N = pool.array(slots_of_pages(free))
            shape = pool.config.kv_heads, len(slots_N), pool.config.row_size
            rows_GND = np.full(shape, SPOILT, np.float32)
            for layer in (n for n, has_window_pages in enumerate(pool.uses_window_pages) if has_window_pages):
                pool.kv.write(layer, slots_N, rows_GND, rows_GND)

    return covered


@cache
def llm(home: Path, name: str, **how: Any) -> LLM:
    if not (home / name).exists():
        save(family_model(name, max_position_embeddings=CONTEXT), home / name)
    draft = save(tiny_model(**SIZES | dict(num_hidden_layers=1, max_position_embeddings=CONTEXT)), home / "draft")
    return LLM(home / name, draft, retrieval_budget=64, speculative_tokens=4, searched_layers="none", **how)


def plain(model: LLM, length: int, mode: str = "ar", tokens: int = TOKENS) -> Any:
    """Return the texts of whole KV."""
    with whole():
        model.reset_prefix_cache()
        texts = alone(model, length, mode=mode, tokens=tokens)
        model.reset_prefix_cache()
    return texts

"""The tiny pair of all engine tests. Its prompts are prefilled in several steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.engine_scene import CHUNK, ByChunks
from tests.helpers.tiny_llm import checkpoints
from triforce.engine import engine_core
from triforce.kvcache.views import full


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a pair whose draft fits the native kernels, too."""
    folder = tmp_path_factory.mktemp("pair")
    checkpoints(folder, head_dim=16)
    return folder


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    """Prefill prompts in several steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full, "PREFILL_CHUNK_ON_CPU", CHUNK)
        patch.setattr(engine_core, "PrefillPacer", ByChunks)
        yield

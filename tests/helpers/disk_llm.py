"""LLMs that share a disk cache, each as if its process had just started, and checks of their texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine_scene import check_same
from tests.helpers.tiny_llm import ask, checkpoints, ids, llm
from triforce.disk_cache import prefixes
from triforce.disk_cache.prefixes import SEGMENT
from triforce.interface.outputs import RequestOutput
from triforce.kvcache import PAGE
from triforce.kvcache.views.full import TAIL
from triforce.llm import LLM


@pytest.fixture(scope="session")
def disk_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with a tiny pair whose draft fits the native kernels, too."""
    folder = tmp_path_factory.mktemp("disk_pair")
    checkpoints(folder, head_dim=16)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for a disk cache. Reads take no measured time, so that a busy machine changes nothing."""
    monkeypatch.setattr(prefixes, "perf_counter", lambda: 0.0)
    return tmp_path / "cache"


HOW: dict[str, Any] = dict(retrieval_budget=64, speculative_tokens=4, searched_layers="none")
PROMPT = ids(590)
SEGMENTS = len(PROMPT) // SEGMENT * SEGMENT
"""Tokens in whole segments."""
WHOLE = (len(PROMPT) - 1 - TAIL) // PAGE * PAGE
"""Tokens restored from disk: segments and the pages after them, but not the last `TAIL` tokens."""


def started(folder: Path, cache: Path, **how: Any) -> LLM:
    """Return a model with no prompt prefilled."""
    return LLM(folder / "target", folder / "draft", disk_cache=cache, **HOW | how)


def written(model: LLM) -> None:
    """Wait for pending writes to the disk cache."""
    assert model.engines.parts.disk and model.engines.parts.disk.queue.flush()


def answer(model: LLM, prompt: Sequence[int], mode: str = "triforce", scope: str | None = "", **how: Any) -> Any:
    """Return the output of one request of a scope, after all its writes to disk."""
    engine = model.open(4, 2400)
    request = model.request(list(prompt), ask(**how), mode, scope)
    engine.submit([request])
    output = engine.finish(request)
    assert isinstance(output, RequestOutput)
    engine.core.write_behind(lambda: False)
    if model.engines.parts.disk:
        written(model)
    engine.close()
    return output


def check_restored(folder: Path, cache: Path, mode: str, coupling: str = "seeded", **how: Any) -> None:
    """Check that a fresh process restores a prompt and gives the output of no disk cache, draft tokens included."""
    plain = llm(folder, coupling=coupling, **how).generate(PROMPT, ask(), mode=mode)[0]
    first_output = answer(started(folder, cache, coupling=coupling, **how), PROMPT, mode)
    again = answer(started(folder, cache, coupling=coupling, **how), PROMPT, mode)
    assert (first_output.cached_tokens, again.cached_tokens) == (0, SEGMENTS if how.get("strict") else WHOLE)
    assert first_output.exactness == again.exactness == plain.exactness
    for output in (first_output, again):
        if mode == "auto":
            assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        else:
            check_same(output.outputs, plain.outputs)

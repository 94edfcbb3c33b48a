"""Strict mode: where bits depend on the shape of a pass, full-tier passes have one shape, and prefills one, too.

The effect of strict mode shows on a GPU only (docs/gpu.md). These tests check the shapes of requested passes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_llm import ask, checkpoints, ids
from triforce.backends.cuda.graphs import PassShape, shape_of
from triforce.backends.kernel_api import ForwardBatch
from triforce.kvcache import PAGE, FullView, PagePool
from triforce.kvcache.prefix_cache import PrefixCache
from triforce.kvcache.views import full
from triforce.llm import LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    checkpoints(folder)
    return folder


def full_passes(folder: Path, monkeypatch: pytest.MonkeyPatch, strict: bool) -> set[tuple[int, int, int]]:
    """Return rows, width and columns at which a GPU would run the scoring passes of the full tier."""
    llm = LLM(folder / "target", folder / "draft", retrieval_budget=64, speculative_tokens=4, strict=strict)
    shapes: set[PassShape] = set()
    model = llm.target.decoder.model
    forward = model.forward

    def spy(ids_BT: Any, kv: Any, batch: ForwardBatch, at_BJ: Any) -> Any:
        if batch.past_committed and at_BJ is not None and at_BJ.shape[1]:
            shapes.add(shape_of(*ids_BT.shape, at_BJ.shape[1], batch, padded=True))
        return forward(ids_BT, kv, batch, at_BJ)

    monkeypatch.setattr(model, "forward", spy)
    for mode in ("ar", "triforce", "retrieval", "draft", "draft-ngram", "auto"):
        for rows in (1, 3):
            llm.generate([ids(150, seed) for seed in range(rows)], ask(max_tokens=8), mode=mode)
    for mode in ("ar", "triforce"):
        swapped_out_and_in(llm, mode)
    return {(shape.rows, shape.width, shape.columns) for shape in shapes}


def swapped_out_and_in(llm: LLM, mode: str) -> None:
    """Run two texts. In the middle of the first one it is swapped out for the other."""
    engine = llm.open(1, 240)
    first_request, second = (llm.request(ids(150, seed), ask(max_tokens=12), mode=mode) for seed in (0, 1))
    engine.submit([first_request])
    while len(first_request.sequences[0].tokens) < 4:
        engine.step()
    engine.submit([second])
    engine.core.swap_out(first_request.groups[0])
    assert not first_request.done and engine.core.scheduler.groups[-1].swapped
    while engine.busy:
        engine.step()
    assert first_request.done and second.done


def test_strict_full_passes_have_one_shape(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert full_passes(folder, monkeypatch, strict=True) == {(8, 32, 32)}
    assert len(full_passes(folder, monkeypatch, strict=False)) > 3, "or there would be nothing to it"


def test_strict_prefill_passes_end_at_same_places(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for any start. Prompts share the KV of whole passes, not a part of one, nor decoded tokens."""
    monkeypatch.setattr(full, "PREFILL_CHUNK_ON_CPU", 64)
    llm = LLM(folder / "target", retrieval_budget=64, strict=True)
    engine = llm.open(1, 640)
    passes: list[tuple[int, int]] = []
    resume = FullView.resume

    def spy(self: FullView, length: int) -> tuple[int, int]:
        passes.append(resume(self, length))
        return passes[-1]

    monkeypatch.setattr(FullView, "resume", spy)

    def read(prompt: list[int]) -> list[tuple[int, int]]:
        passes.clear()
        engine.submit([llm.request(prompt, ask(max_tokens=60), mode="ar")])
        while engine.busy:
            engine.step()
        return [span for span in passes if span[0] < span[1]]

    prompt = ids(260)
    assert read(prompt) == [(0, 64), (64, 128), (128, 192), (192, 243), (243, 259)]
    assert read(prompt) == [(192, 243), (243, 259)]
    longer = [*prompt[:250], *ids(150, seed=1)]
    assert read(longer)[0] == (192, 256), "the pass that read the rest was another one"


def test_strict_prefixes_are_shared_in_whole_chunks(folder: Path) -> None:
    target = LLM(folder / "target").target.decoder
    pool = PagePool(target.config, 1, 40, target.dtype)
    pool.reserve(0, 320)
    text = ids(320)
    for chunk, page_count in ((PAGE, 15), (64, 12), (256, 0)):
        prefixes = PrefixCache(pool, chunk)
        prefixes.insert("", text, pool.tables[0])
        assert len(prefixes.find("", text[:270]).prefix.pages) == page_count

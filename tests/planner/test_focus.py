"""Which layers a retrieval tier sees in full: what is found, and that looking for it leaves no trace."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.laws.tiny import MODELS, PROMPTS, SETTING, finished
from triforce import LLM, SamplingParams
from triforce.batch import Batch
from triforce.errors import RequestError
from triforce.job import Job
from triforce.ladder import MODES
from triforce.planner import Focus, focus

PARAMS = SamplingParams(0.8, max_tokens=40)
OPEN = replace(SETTING, retrieval=replace(SETTING.retrieval, full_layers=None))


def read(mode: str, focus: Focus | None) -> Batch:
    jobs = [Job(prompt, PARAMS, seed=7, choice=b) for b, prompt in enumerate(PROMPTS)]
    batch = Batch(MODELS, MODES[mode], OPEN, "seeded", jobs, focus=focus)
    deque(batch.prefill(), maxlen=0)
    return batch


@pytest.mark.parametrize("mode", ["retrieval", "triforce", "lookup"])
def test_looking_leaves_committed_kv_and_text_as_they_are(mode: str) -> None:
    plain, looked = read(mode, None), read(mode, Focus(seeded=True))
    for b, prompt in enumerate(PROMPTS):
        assert looked.top.cache.lengths_B[b] == len(prompt) - 1
        for layer in range(MODELS.target.config.layers):
            for one, other in zip(
                *(x.top.cache.pool.span(layer, b, 0, len(prompt) - 1) for x in (plain, looked)), strict=True
            ):
                torch.testing.assert_close(one, other)
    assert torch.equal(finished(looked), finished(read("ar", None)))


@pytest.mark.parametrize(
    ("shares", "found"),
    [
        ({(): 0.5, (0,): 0.95, (1,): 0.5, (0, 1): 0.96}, {0}),
        ({(): 0.5, (0,): 0.5, (1,): 0.9, (0, 1): 0.999}, {1}),
        ({(): 0.95, (0,): 0.96, (1,): 0.96, (0, 1): 0.97}, set()),
    ],
)
def test_a_layer_is_seen_in_full_where_that_pays(
    shares: dict[tuple[int, ...], float], found: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(focus._Trial, "shares", lambda self, tried: {c: shares[tuple(sorted(c))] for c in tried})
    batch = read("triforce", Focus(seeded=True))
    assert batch.top.below.cache.searched_layers == found  # type: ignore[union-attr]


def test_what_was_found_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    eye = Focus(seeded=True)
    first = read("retrieval", eye)
    monkeypatch.setattr(focus._Trial, "best", lambda *_: pytest.fail("looked again"))
    assert read("retrieval", eye).top.below.cache.searched_layers == first.top.below.cache.searched_layers  # type: ignore[union-attr]


def test_the_budget_is_enough_for_a_short_prompt() -> None:
    roomy = replace(OPEN, retrieval=replace(OPEN.retrieval, budget=replace(OPEN.retrieval.budget, tokens=160)))
    batch = Batch(MODELS, MODES["retrieval"], roomy, "seeded", [Job(PROMPTS[0], PARAMS, 1)], focus=Focus(seeded=True))
    deque(batch.prefill(), maxlen=0)
    assert not batch.focus._found  # type: ignore[union-attr]


def test_layers_that_a_model_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="0 to 5"):
        LLM(full_layers="6")

"""Texts over a retrieval view equal those of plain decoding, however little it selects."""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any

import pytest
import torch

from tests.helpers.slow_parameters import slow
from tests.helpers.small_decoder import VOCAB, small_decoder, text
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.sequence_group import prefill_batch
from triforce.engine.tier_builder import MODES, ModelSet, SpeculativeConfig
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import RetrievalConfig
from triforce.kvcache.selection import POLICIES

torch.set_num_threads(1)


DECODER = small_decoder()
GAMMAS = ("draft_tokens", "speculative_tokens", "retrieval_policy")


def generate(mode: str, prompts: list[list[int]], tokens: int, **how: Any) -> tuple[list[list[int]], SequenceBatch]:
    params = SamplingParams(temperature=0.8, max_tokens=tokens)
    sequences = [TokenSequence(prompt, params, seed=5 + b) for b, prompt in enumerate(prompts)]
    gammas = {name: how.pop(name) for name in GAMMAS if name in how}
    retrieval = RetrievalConfig.parse(**(dict(budget=48, chunk=16, refresh=1, searched_layers="none") | how))
    models = ModelSet(DECODER, small_decoder(seed=3, layers=1))
    batch = SequenceBatch(models, MODES[mode], SpeculativeConfig(**gammas, retrieval=retrieval), "seeded", sequences)
    deque(prefill_batch(batch), maxlen=0)
    while not batch.done:
        batch.step()
    return [sequence.tokens for sequence in sequences], batch


PROMPTS = [text(30, seed=20), text(77, seed=21), text(150, seed=22)]


@cache
def plain(tokens: int) -> list[list[int]]:
    return generate("ar", PROMPTS, tokens)[0]


@cache
def plain_alone(tokens: int) -> list[list[int]]:
    return generate("ar", PROMPTS[:1], tokens)[0]


@pytest.mark.parametrize(
    "how",
    [
        *(dict(chunk=chunk, retrieval_policy=name) for chunk in (8, 100) for name in POLICIES),
        *slow(*(dict(chunk=chunk, retrieval_policy=name) for chunk in (16, 32) for name in POLICIES)),
        *(dict(refresh=refresh) for refresh in (0, "auto")), *slow(*(dict(refresh=refresh) for refresh in (1, 3))),
        dict(searched_layers="1"), dict(searched_layers="0-1"), dict(budget="20%"),
        dict(budget="1%", retrieval_policy="quest"),
        dict(mode="streaming"), dict(mode="streaming", chunk=8), dict(mode="ngram"), dict(mode="triforce"),
        dict(mode="triforce", draft_tokens=1, speculative_tokens=1, refresh="auto"),
        *slow(dict(speculative_tokens=24), dict(speculative_tokens=24, refresh=0)),
        *slow(dict(mode="ngram", draft_tokens=20, speculative_tokens=20, retrieval_policy="mean_key")),
    ],
    ids=lambda how: "-".join(f"{value}" for value in how.values()),
)  # fmt: skip
def test_retrieval_texts_equal_plain_decoding(how: dict[str, Any]) -> None:
    how = dict(how)
    assert generate(how.pop("mode", "retrieval"), PROMPTS, 32, **how)[0] == plain(32)


@pytest.mark.parametrize("policy", POLICIES)
def test_retrieval_generation_far_beyond_budget_is_exact(policy: str) -> None:
    """A text of six times the budget is generated from a short prompt; the visible tokens stay within the budget."""
    texts, batch = generate("retrieval", PROMPTS[:1], 200, budget=32, retrieval_policy=policy)
    assert texts == plain_alone(200)
    choice = batch.top.below.cache.selections[0].pages
    assert choice.tokens <= 32 and choice.end > 180
    assert all(0 <= token < VOCAB for token in texts[0])

"""The draft's view runs ahead and is rewound: rewound tokens leave no trace."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.helpers.small_decoder import VOCAB, feed, text
from tests.helpers.streaming_reference import DECODER, IDS, SINKS, SLACK, SLOW, WINDOW, Slow, in_pieces, same, view
from triforce.errors import CacheError
from triforce.kvcache import PAGE
from triforce.ragged import ints

torch.set_num_threads(1)
FAR = 120
"""Tokens beyond which the two ways to rotate may differ by more than `CLOSE`, where attention is ill-conditioned."""


class Rewinds(RuleBasedStateMachine):
    """Ragged rows run ahead and are rewound, each by its own amount, never by more than the slack."""

    ROWS = 3

    @initialize(seed=st.integers(0, 2**32 - 1))
    def start(self, seed: int) -> None:
        chance = Random(seed)
        self.cache = view(self.ROWS)
        self.texts = [text(chance.choice([1, 3, chance.randint(1, 40)]), seed=seed + b) for b in range(self.ROWS)]
        self.highest = [0] * self.ROWS
        self.slow = [Slow(DECODER.config, SINKS, WINDOW) for _ in range(self.ROWS)]
        for b, ids in enumerate(self.texts):
            in_pieces(self.cache.row(b), ids, chance)
            feed(DECODER, self.slow[b], [ids])
        self.highest = [len(ids) for ids in self.texts]

    @rule(seed=st.integers(0, 2**32 - 1))
    def run_ahead(self, seed: int) -> None:
        chance = Random(seed)
        fed = [[chance.randrange(VOCAB) for _ in range(chance.randint(0, SLACK))] for _ in self.texts]
        if not any(fed) or max(map(len, self.texts)) > FAR:
            return
        logits = feed(DECODER, self.cache, fed, padding=chance.randint(0, 2))
        for b, tokens in enumerate(fed):
            if tokens:
                same(logits[b], feed(DECODER, self.slow[b], [tokens])[0])
            self.texts[b] += tokens
            self.highest[b] = max(self.highest[b], len(self.texts[b]))

    @rule(seed=st.integers(0, 2**32 - 1))
    def take_back(self, seed: int) -> None:
        chance = Random(seed)
        for b, ids in enumerate(self.texts):
            shortest_length = max(0, self.highest[b] - SLACK)
            kept_tokens = chance.randint(min(shortest_length, len(ids)), len(ids))
            del ids[kept_tokens:]
            self.slow[b].length = kept_tokens
        self.cache.rewind(ints([*map(len, self.texts)]))
        self._spoil()

    def _spoil(self) -> None:
        """Overwrite rewound KV with large numbers, so that any read of it shows."""
        for b, ids in enumerate(self.texts):
            for position in range(len(ids), self.highest[b]):
                place = position if position < SINKS else SINKS + (position - SINKS) % self.cache.ring
                slot = (1 + b * self.cache.pages) * PAGE + place
                self.cache.kv.keys_LGSD[:, :, slot] = 30.0
                self.cache.kv.values_LGSD[:, :, slot] = 1e6

    @invariant()
    def lengths_are_the_texts(self) -> None:
        if hasattr(self, "slow"):
            assert self.cache.lengths_B.tolist() == [len(ids) for ids in self.texts]


def test_streaming_rewind_leaves_no_trace() -> None:
    run_state_machine_as_test(
        Rewinds, settings=settings(max_examples=8, stateful_step_count=15, deadline=None, derandomize=True)
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_streaming_rewind_leaves_no_trace_long() -> None:
    run_state_machine_as_test(Rewinds, settings=settings(max_examples=200, stateful_step_count=50, deadline=None))


@pytest.mark.parametrize("length", [3, 12, 19, 20, 40])
def test_streaming_whole_slack_can_be_rewound(length: int) -> None:
    cache = view()
    in_pieces(cache, IDS[:length], Random(0))
    feed(DECODER, cache, [text(SLACK, seed=5)])
    cache.rewind(ints([length]))
    same(feed(DECODER, cache, [IDS[length : length + SLACK]])[0], SLOW[length : length + SLACK])


@pytest.mark.parametrize("back", [1, 2, 30])
def test_streaming_rewind_beyond_slack_raises(back: int) -> None:
    cache = view()
    in_pieces(cache, IDS[:40], Random(0))
    cache.rewind(ints([40 - SLACK - back]))
    with pytest.raises(CacheError, match="slack 6"):
        feed(DECODER, cache, [[1]])
    assert cache.lengths_B.tolist() == [40 - SLACK - back]


def test_streaming_ahead_beyond_slack_raises() -> None:
    cache = view(2)
    with pytest.raises(CacheError, match="slack 6"):
        feed(DECODER, cache, [[1], IDS[: SLACK + 1]])
    assert cache.lengths_B.tolist() == [0, 0]
    same(in_pieces(cache.row(1), IDS, Random(0)), SLOW)


def test_streaming_finished_row_may_lag() -> None:
    """Rows that are not fed are not checked for their slack."""
    cache = view(2)
    in_pieces(cache.row(0), IDS[:40], Random(0))
    in_pieces(cache.row(1), IDS[:40], Random(0))
    cache.rewind(ints([10, 40]))
    same(feed(DECODER, cache, [[], IDS[40:42]])[1], SLOW[40:42])

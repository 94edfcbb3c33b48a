"""A state machine that plays the tiers over one pool: see test_kv_laws.py."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from tests.helpers.lower_view import lower_view
from tests.helpers.small_decoder import (
    CLOSE,
    VOCAB,
    Seen,
    assert_holds,
    dense,
    everything,
    feed,
    make_pool,
    poison,
    prefill,
    slots_of,
    small_decoder,
    text,
)
from triforce.kvcache import FullView, RetrievalConfig, RetrievalView
from triforce.kvcache.retrieval_config import Budget
from triforce.kvcache.selection import POLICIES, Recent
from triforce.ragged import ints

DECODER = small_decoder()

CAPACITY = 208

LONGEST = CAPACITY - 16

LENGTHS = [1, 2, 15, 16, 17, 40, 95, 100, 111, 112, 113, 128, 130, 140, 150]

SEEDS = st.integers(0, 2**32 - 1)


def some_tokens(chance: Random, max_count: int) -> list[int]:
    return [chance.randrange(VOCAB) for _ in range(chance.randint(0, max(0, max_count)))]


def seen_by(lower: RetrievalView, b: int) -> Seen:
    """Return the tokens that row b's selection lets a query see; slots are looked up in the page table."""
    choice = lower.selections[b].pages
    pool = lower.full.pool
    row = lower.full.rows[b]
    if choice is None:
        return everything
    token_at = {slot: n for n, slot in enumerate(pool.slots(row, 0, CAPACITY).tolist())}
    chosen = [[{token_at[slot] for slot in head} for head in slots_GN.tolist()] for slots_GN in slots_of(lower, b)]
    recent = lower.selections[b].window_start

    def seen(layer: int, g: int, position: int) -> set[int] | None:
        if layer in lower.full_layers:
            return None
        return chosen[layer][g] | set(range(recent, position + 1))

    return seen


class Tiers(RuleBasedStateMachine):
    """Row b commits `texts[b]`; the lower view holds draft tokens `ahead[b]` after it, and the tokens they see."""

    @initialize(
        seed=SEEDS,
        policy=st.sampled_from(["recent", *POLICIES]),
        budget=st.sampled_from([64, 80, 48, 32, 1000]),
        chunk=st.sampled_from([16, 8, 5, 32]),
        refresh=st.sampled_from([1, 0, 2, None]),
    )
    def start(self, seed: int, policy: str, budget: int, chunk: int, refresh: int | None) -> None:
        chance = Random(seed)
        lengths = [chance.choice(LENGTHS) for _ in range(chance.randint(1, 3))]
        twin = chance.random() < 0.3
        self.texts = [text(length, seed=seed + b) for b, length in enumerate(lengths)]
        rows = len(lengths) + twin
        self.pool = make_pool(DECODER, rows, CAPACITY, fragmented=chance.random() < 0.5)
        self.full = FullView(self.pool)
        searched_layers = frozenset(layer for layer in range(2) if chance.random() < 0.2)
        setting = RetrievalConfig(Budget(budget), chunk, refresh, searched_layers)
        self.view = lower_view(self.full, {"recent": Recent, **POLICIES}[policy], setting)
        for b, ids in enumerate(self.texts):
            prefill(DECODER, self.full, b, ids)
        if twin:
            self.full.fork(0, rows - 1)
            self.view.fork(0, rows - 1)
            self.texts.append(list(self.texts[0]))
        self.truths = [dense(DECODER, ids) for ids in self.texts]
        self.ahead: list[list[tuple[int, Seen]]] = [[] for _ in self.texts]

    @property
    def rows(self) -> range:
        return range(len(self.texts))

    @rule(seed=SEEDS)
    def draft(self, seed: int) -> None:
        """Run a pass of the lower view: it sees its selection, and does not change committed KV."""
        chance = Random(seed)
        room = [LONGEST - len(self.texts[b]) - len(self.ahead[b]) for b in self.rows]
        fed = [some_tokens(chance, min(4, free)) for free in room]
        if not any(fed):
            return
        committed = [self.pool.slots(b, 0, len(self.texts[b])) for b in self.rows]
        memory_before = [self._memory(slots_N) for slots_N in committed]
        logits = feed(DECODER, self.view, fed, padding=chance.randint(0, 2))
        for b in self.rows:
            assert torch.equal(self._memory(committed[b]), memory_before[b]), "a lower view wrote a committed slot"
            if fed[b]:
                self.ahead[b] += [(token, seen_by(self.view, b)) for token in fed[b]]
                torch.testing.assert_close(logits[b], self._ahead_logits(b)[-len(fed[b]) :], **CLOSE)

    @rule(seed=SEEDS)
    def refuse_inside(self, seed: int) -> None:
        """Reject some draft tokens by the lower view's own verification."""
        chance = Random(seed)
        for drafted in self.ahead:
            del drafted[chance.randint(0, len(drafted)) :]
        self.view.rewind(ints([len(self.texts[b]) + len(self.ahead[b]) for b in self.rows]))
        self._poison()

    @rule(seed=SEEDS)
    def verify(self, seed: int) -> None:
        """Verify the draft tokens by the exact view, and some that were drawn but not fed below; accept any number."""
        chance = Random(seed)
        fed: list[list[int]] = []
        for ids, drafted in zip(self.texts, self.ahead, strict=True):
            tokens = [token for token, _ in drafted]
            tokens += some_tokens(chance, min(3, LONGEST - len(ids) - len(tokens)))
            fed.append(tokens if chance.random() < 0.8 else [])
        if not any(fed):
            return
        logits = feed(DECODER, self.full, fed, padding=1)
        for b in self.rows:
            truth = self.truths[b]
            if fed[b]:
                expected = feed(DECODER, truth, [fed[b]])[0]
                torch.testing.assert_close(logits[b], expected, **CLOSE)
            accepted = chance.choice([len(fed[b]), chance.randint(0, len(fed[b]))])
            truth.cut(len(self.texts[b]) + accepted)
            self.texts[b] += fed[b][:accepted]
            if fed[b]:
                self.ahead[b] = []
        lengths_B = ints([*map(len, self.texts)])
        self.full.rewind(lengths_B)
        # A row that was not live keeps its draft tokens in the lower view.
        self.view.rewind(lengths_B + ints([*map(len, self.ahead)]))
        self._poison()

    @invariant()
    def lengths_are_the_texts(self) -> None:
        if not hasattr(self, "ahead"):
            return
        assert self.full.lengths_B.tolist() == [len(ids) for ids in self.texts]
        assert self.view.lengths_B.tolist() == [len(self.texts[b]) + len(self.ahead[b]) for b in self.rows]
        assert (self.view.lengths_B >= self.full.lengths_B).all()

    @invariant()
    def committed_is_a_fresh_prefill(self) -> None:
        for b in self.rows if hasattr(self, "ahead") else ():
            assert_holds(self.full, b, self.truths[b])

    def teardown(self) -> None:
        """Check once more against a fresh prefill, as the oracle has grown step by step, too."""
        for b in self.rows if hasattr(self, "ahead") else ():
            assert_holds(self.full, b, dense(DECODER, self.texts[b]))
            assert_holds(self.full.row(b), 0, dense(DECODER, self.texts[b]))

    def _memory(self, slots_N: Tensor) -> Tensor:
        return torch.stack([self.pool.kv.keys_LGSD[:, :, slots_N], self.pool.kv.values_LGSD[:, :, slots_N]])

    def _ahead_logits(self, b: int) -> Tensor:
        """Return logits of successive draft tokens, each with its own visible tokens, on top of an exact prefill."""
        cache = self.truths[b].copy()
        logits = []
        for token, cache.seen in self.ahead[b]:
            logits.append(feed(DECODER, cache, [[token]])[0])
        return torch.cat(logits)

    def _poison(self) -> None:
        for b in self.rows:
            poison(self.pool, self.pool.slots(b, len(self.texts[b]) + len(self.ahead[b]), CAPACITY))

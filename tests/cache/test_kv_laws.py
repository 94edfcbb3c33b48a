"""Laws of the shared pool: whatever the tiers do, the committed KV is that of a fresh prefill.

A state machine plays the tiers with the real decoder: guesses of any length through the lower view, inner refusals,
verifications that keep any number of them, ragged rows. Whatever is refused is overwritten with NaN, so that whoever
looks at it is found out. Dense caches (small.py) say what each pass should have given.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from small import (
    CLOSE,
    VOCAB,
    Dense,
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
from torch import Tensor

from triforce.cache import Full, Retrieval, Setting
from triforce.cache.budget import Budget
from triforce.cache.select import POLICIES, Recent
from triforce.kernels import Lists
from triforce.shapes import Ints, ints

torch.set_num_threads(1)
DECODER = small_decoder()
CAPACITY = 208
LONGEST = CAPACITY - 16
LENGTHS = [1, 2, 15, 16, 17, 40, 95, 100, 111, 112, 113, 128, 130, 140, 150]
SEEDS = st.integers(0, 2**32 - 1)


def some_tokens(chance: Random, most: int) -> list[int]:
    return [chance.randrange(VOCAB) for _ in range(chance.randint(0, max(0, most)))]


def seen_by(lower: Retrieval, b: int) -> Seen:
    """What row b's choice lets a query see, in tokens: slots are looked up in the page table."""
    choice, pool, row = lower.choices[b], lower.full.pool, lower.full.rows[b]
    if choice is None:
        return everything
    token_at = {slot: n for n, slot in enumerate(pool.slots(row, 0, CAPACITY).tolist())}
    chosen = [[{token_at[slot] for slot in head} for head in slots_GN.tolist()] for slots_GN in slots_of(lower, b)]
    recent = lower.recent[b]

    def seen(layer: int, g: int, position: int) -> set[int] | None:
        if layer in lower.full_layers:
            return None
        return chosen[layer][g] | set(range(recent, position + 1))

    return seen


class Tiers(RuleBasedStateMachine):
    """Row b has the committed text `texts[b]`, and the lower view holds `ahead[b]` beyond it, with what each saw."""

    exact: type[Full] = Full
    lower: type[Retrieval] = Retrieval

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
        self.full = self.exact(self.pool)
        whole = frozenset(layer for layer in range(2) if chance.random() < 0.2)
        setting = Setting(Budget(budget), chunk, refresh, whole)
        self.view = self.lower(self.full, {"recent": Recent, **POLICIES}[policy], setting)
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
    def guess(self, seed: int) -> None:
        """A pass of the lower view: it shows what was chosen, and leaves what is committed alone."""
        chance = Random(seed)
        room = [LONGEST - len(self.texts[b]) - len(self.ahead[b]) for b in self.rows]
        fed = [some_tokens(chance, min(4, free)) for free in room]
        if not any(fed):
            return
        committed = [self.pool.slots(b, 0, len(self.texts[b])) for b in self.rows]
        before = [self._memory(slots_N) for slots_N in committed]
        logits = feed(DECODER, self.view, fed, padding=chance.randint(0, 2))
        for b in self.rows:
            assert torch.equal(self._memory(committed[b]), before[b]), "a lower view wrote a committed slot"
            if fed[b]:
                self.ahead[b] += [(token, seen_by(self.view, b)) for token in fed[b]]
                torch.testing.assert_close(logits[b], self._ahead_logits(b)[-len(fed[b]) :], **CLOSE)

    @rule(seed=SEEDS)
    def refuse_inside(self, seed: int) -> None:
        """The lower view's own verification refuses some of what was guessed below it."""
        chance = Random(seed)
        for ahead in self.ahead:
            del ahead[chance.randint(0, len(ahead)) :]
        self.view.rewind(ints([len(self.texts[b]) + len(self.ahead[b]) for b in self.rows]))
        self._poison()

    @rule(seed=SEEDS)
    def verify(self, seed: int) -> None:
        """The exact view verifies the guesses, and some that were drawn but not fed below; any number is kept."""
        chance = Random(seed)
        fed: list[list[int]] = []
        for ids, ahead in zip(self.texts, self.ahead, strict=True):
            tokens = [token for token, _ in ahead]
            tokens += some_tokens(chance, min(3, LONGEST - len(ids) - len(tokens)))
            fed.append(tokens if chance.random() < 0.8 else [])
        if not any(fed):
            return
        logits = feed(DECODER, self.full, fed, padding=1)
        for b in self.rows:
            truth = self.truths[b]
            if fed[b]:
                wanted = feed(DECODER, truth, [fed[b]])[0]
                torch.testing.assert_close(logits[b], wanted, **CLOSE)
            kept = chance.choice([len(fed[b]), chance.randint(0, len(fed[b]))])
            truth.cut(len(self.texts[b]) + kept)
            self.texts[b] += fed[b][:kept]
            if fed[b]:
                self.ahead[b] = []
        lengths_B = ints([*map(len, self.texts)])
        self.full.rewind(lengths_B)
        # A row that was not live keeps what the lower view holds of it.
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
        """Once more from scratch: the oracle has grown step by step too."""
        for b in self.rows if hasattr(self, "ahead") else ():
            assert_holds(self.full, b, dense(DECODER, self.texts[b]))
            assert_holds(self.full.row(b), 0, dense(DECODER, self.texts[b]))

    def _memory(self, slots_N: Tensor) -> Tensor:
        return torch.stack([self.pool.memory.keys_LGSD[:, :, slots_N], self.pool.memory.values_LGSD[:, :, slots_N]])

    def _ahead_logits(self, b: int) -> Tensor:
        """One guess after the other, each with the sight that it had, on top of an exact prefill."""
        cache, logits = self.truths[b].copy(), []
        for token, cache.seen in self.ahead[b]:
            logits.append(feed(DECODER, cache, [[token]])[0])
        return torch.cat(logits)

    def _poison(self) -> None:
        for b in self.rows:
            poison(self.pool, self.pool.slots(b, len(self.texts[b]) + len(self.ahead[b]), CAPACITY))


SHORT = settings(max_examples=25, stateful_step_count=12, deadline=None, derandomize=True)
LONG = settings(max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


def test_any_sequence_of_guesses_and_verifications() -> None:
    run_state_machine_as_test(Tiers, settings=SHORT)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_sequences_of_guesses_and_verifications() -> None:
    run_state_machine_as_test(Tiers, settings=LONG)


class OwnLength(Retrieval):
    """Falls behind the committed length after a full acceptance, and feeds the difference over exact slots."""

    @property
    def lengths_B(self) -> Ints:
        self.ahead_B = np.where(self.ahead_B == 0, self.full.lengths_B, self.ahead_B)
        return self.ahead_B


class Forgetful(Retrieval):
    def rewind(self, lengths_B: Ints) -> None:
        """Forgets to forget."""


class FullForgetful(Full):
    def rewind(self, lengths_B: Ints) -> None:
        """Forgets to forget."""


class WrongGroup(Retrieval):
    """Each KV head looks at what was chosen for its neighbour."""

    def _views(self, starts: list[int], counts: list[int]) -> list[tuple[int, Lists]]:
        flip = {2: lambda units_BU: units_BU, 4: lambda units_LBGU: units_LBGU.flip(2)}
        views = super()._views(starts, counts)
        return [(n, replace(lists, units=flip[lists.units.ndim](lists.units))) for n, lists in views]


class Shifted(Retrieval):
    """Its queries stand `by` places further than they should."""

    by = 0

    def _views(self, starts: list[int], counts: list[int]) -> list[tuple[int, Lists]]:
        views = super()._views(starts, counts)
        return [(n, replace(lists, starts=[max(0, x + self.by) for x in lists.starts])) for n, lists in views]


class NoRefusedSlots(Shifted):
    """Sees stale keys: one token more than there is."""

    by = 1


class OneBehind(Shifted):
    """Writes one slot too early: into the last committed one."""

    by = -1


@pytest.mark.parametrize(
    "mutant",
    [
        dict(lower=OwnLength),
        dict(lower=Forgetful),
        dict(exact=FullForgetful),
        dict(lower=WrongGroup),
        dict(lower=NoRefusedSlots),
        dict(lower=OneBehind),
    ],
    ids=lambda mutant: next(iter(mutant.values())).__name__,
)
def test_mutants_break_a_law(mutant: dict[str, type]) -> None:
    machine = type("Mutant", (Tiers,), mutant)
    once = settings(SHORT, max_examples=100, phases=[Phase.generate], report_multiple_bugs=False, print_blob=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=once)


def conversation(length: int = 120, policy: str = "observed", **how: Any) -> tuple[Full, Retrieval, list[int]]:
    """A row with room, prefilled, and a lower view of it that sees about half."""
    full, ids = Full(make_pool(DECODER, 1, CAPACITY)), text(length)
    prefill(DECODER, full, 0, ids)
    return full, Retrieval(full, POLICIES[policy], Setting(Budget(64), **how)), ids


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [1, 15, 17, 100])
def test_a_budget_that_covers_the_context_is_the_exact_view(policy: str, length: int) -> None:
    full, ids = Full(make_pool(DECODER, 1, CAPACITY)), text(length)
    prefill(DECODER, full, 0, ids)
    lower = Retrieval(full, POLICIES[policy], Setting(Budget(112)))
    guess = text(5, seed=7)
    logits = feed(DECODER, lower, [guess])[0]
    torch.testing.assert_close(logits, feed(DECODER, full, [guess])[0], atol=1e-9, rtol=1e-9)


def test_a_small_budget_is_not_the_exact_view() -> None:
    """Else the law above would say nothing."""
    full, lower, _ = conversation()
    guess = text(5, seed=7)
    assert (feed(DECODER, lower, [guess])[0] - feed(DECODER, full, [guess])[0]).abs().max() > 0.1


def test_verification_replaces_what_the_lower_view_wrote() -> None:
    full, lower, ids = conversation()
    guess = text(4, seed=8)
    feed(DECODER, lower, [guess])
    slots_N = full.pool.slots(0, 120, 124)
    approximate = full.pool.memory.keys_LGSD[1][:, slots_N].clone()
    feed(DECODER, full, [guess])
    assert (approximate - full.pool.memory.keys_LGSD[1][:, slots_N]).abs().max() > 1e-2
    assert_holds(full, 0, dense(DECODER, ids + guess))


@pytest.mark.parametrize("cut", [119, 90, 40, 20, 0])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_text_cut_far_back_shows_nothing_of_its_old_end(policy: str, cut: int) -> None:
    """`rewind` promises to see at most so many tokens, and a choice made before must not outlive that."""
    full, lower, ids = conversation(policy=policy)
    feed(DECODER, lower, [text(2)])
    full.rewind(ints([cut]))
    lower.rewind(ints([cut]))
    poison(full.pool, full.pool.slots(0, cut, CAPACITY))
    assert_shows_what_it_chose(lower, ids[:cut])
    ids = ids[:cut] + text(60, seed=10)
    prefill(DECODER, full, 0, ids)
    lower.rewind(full.lengths_B)
    assert_holds(full, 0, dense(DECODER, ids))
    assert_shows_what_it_chose(lower, ids)


def assert_shows_what_it_chose(lower: Retrieval, ids: list[int]) -> None:
    guess = text(3, seed=len(ids))
    logits = feed(DECODER, lower, [guess])[0]
    cache = dense(DECODER, ids)
    cache.seen = seen_by(lower, 0)
    torch.testing.assert_close(logits, feed(DECODER, cache, [guess])[0], **CLOSE)


def test_row_shares_and_fork_copies() -> None:
    full = Full(make_pool(DECODER, 3, CAPACITY, fragmented=True))
    ids = text(50)
    prefill(DECODER, full, 1, ids)
    row = full.row(1)
    assert row.lengths_B.tolist() == [50]
    feed(DECODER, row, [[1, 2, 3]])
    assert full.lengths_B.tolist() == [0, 53, 0]
    assert_holds(full, 1, dense(DECODER, [*ids, 1, 2, 3]))
    row.rewind(ints([50]))
    assert full.lengths_B.tolist() == [0, 50, 0]
    full.fork(1, 2)
    assert full.lengths_B.tolist() == [0, 50, 50]
    a, b = text(6, seed=1), text(9, seed=2)
    feed(DECODER, full, [[], a, b])
    assert_holds(full, 1, dense(DECODER, ids + a))
    assert_holds(full, 2, dense(DECODER, ids + b))
    assert full.sights[1] is not full.sights[2]


def test_a_forked_row_selects_like_its_twin() -> None:
    full = Full(make_pool(DECODER, 2, CAPACITY))
    prefill(DECODER, full, 0, text(130))
    lower = Retrieval(full, POLICIES["observed"], Setting(Budget(64)))
    full.fork(0, 1)
    lower.fork(0, 1)
    logits = feed(DECODER, lower, [[1, 2], [1, 2]])
    torch.testing.assert_close(logits[0], logits[1], atol=1e-9, rtol=1e-9)


def test_the_oracle_is_a_cache_like_any_other() -> None:
    """The dense cache fed in pieces, with a rewind between, equals itself fed at once: the judge is judged."""
    ids, cache = text(40), Dense(DECODER.config)
    feed(DECODER, cache, [[*ids[:20], 5, 6]])
    cache.cut(20)
    pieces = feed(DECODER, cache, [ids[20:]])[0]
    torch.testing.assert_close(pieces, feed(DECODER, Dense(DECODER.config), [ids])[0][20:], **CLOSE)

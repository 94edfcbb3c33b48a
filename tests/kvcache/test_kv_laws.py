"""Laws of the shared pool: whatever the tiers do, the committed KV is that of a fresh prefill.

A state machine plays the tiers with the real decoder: guesses of any length through the lower view, inner refusals,
verifications that keep any number of them, ragged rows. Whatever is refused is overwritten with NaN, so that whoever
looks at it is found out. Dense caches (small.py) say what each pass should have given.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.helpers.small_decoder import (
    CLOSE,
    Dense,
    assert_holds,
    dense,
    feed,
    make_pool,
    poison,
    prefill,
    text,
)
from tests.helpers.tier_machine import CAPACITY, DECODER, Tiers, seen_by
from triforce.backends.dispatch import PageTable
from triforce.kvcache import FullView, RetrievalConfig, RetrievalView
from triforce.kvcache.retrieval_config import Budget
from triforce.kvcache.selection import POLICIES
from triforce.ragged import Ints, ints

torch.set_num_threads(1)

SHORT = settings(max_examples=25, stateful_step_count=12, deadline=None, derandomize=True)

LONG = settings(max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


def test_any_sequence_of_guesses_and_verifications() -> None:
    run_state_machine_as_test(Tiers, settings=SHORT)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_sequences_of_guesses_and_verifications() -> None:
    run_state_machine_as_test(Tiers, settings=LONG)


class OwnLength(RetrievalView):
    """Falls behind the committed length after a full acceptance, and feeds the difference over exact slots."""

    @property
    def lengths_B(self) -> Ints:
        self.ahead_B = np.where(self.ahead_B == 0, self.full.lengths_B, self.ahead_B)
        return self.ahead_B


class Forgetful(RetrievalView):
    def rewind(self, lengths_B: Ints) -> None:
        """Forgets to forget."""


class FullForgetful(FullView):
    def rewind(self, lengths_B: Ints) -> None:
        """Forgets to forget."""


class WrongGroup(RetrievalView):
    """Each KV head looks at what was chosen for its neighbour."""

    def _views(self, starts: list[int], counts: list[int]) -> list[tuple[int, PageTable]]:
        flip = {2: lambda units_BU: units_BU, 4: lambda units_LBGU: units_LBGU.flip(2)}
        views = super()._views(starts, counts)
        return [(n, replace(lists, units=flip[lists.units.ndim](lists.units))) for n, lists in views]


class Shifted(RetrievalView):
    """Its queries stand `by` places further than they should."""

    by = 0

    def _views(self, starts: list[int], counts: list[int]) -> list[tuple[int, PageTable]]:
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


def conversation(length: int = 120, policy: str = "observed", **how: Any) -> tuple[FullView, RetrievalView, list[int]]:
    """A row with room, prefilled, and a lower view of it that sees about half."""
    full, ids = FullView(make_pool(DECODER, 1, CAPACITY)), text(length)
    prefill(DECODER, full, 0, ids)
    return full, RetrievalView(full, POLICIES[policy], RetrievalConfig(Budget(64), **how)), ids


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [1, 15, 17, 100])
def test_a_budget_that_covers_the_context_is_the_exact_view(policy: str, length: int) -> None:
    full, ids = FullView(make_pool(DECODER, 1, CAPACITY)), text(length)
    prefill(DECODER, full, 0, ids)
    lower = RetrievalView(full, POLICIES[policy], RetrievalConfig(Budget(112)))
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


def assert_shows_what_it_chose(lower: RetrievalView, ids: list[int]) -> None:
    guess = text(3, seed=len(ids))
    logits = feed(DECODER, lower, [guess])[0]
    cache = dense(DECODER, ids)
    cache.seen = seen_by(lower, 0)
    torch.testing.assert_close(logits, feed(DECODER, cache, [guess])[0], **CLOSE)


def test_row_shares_and_fork_copies() -> None:
    full = FullView(make_pool(DECODER, 3, CAPACITY, fragmented=True))
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
    full = FullView(make_pool(DECODER, 2, CAPACITY))
    prefill(DECODER, full, 0, text(130))
    lower = RetrievalView(full, POLICIES["observed"], RetrievalConfig(Budget(64)))
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

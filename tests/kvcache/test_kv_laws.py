"""Laws of the shared pool: after any actions of the tiers, the committed KV is that of a fresh prefill.

A state machine plays the tiers with the real decoder: drafts of any length through the lower view, inner rejections,
verifications that accept any number of draft tokens, ragged rows. Rejected KV is overwritten with NaN, so that any
read of it shows. Dense caches (small_decoder.py) give the expected result of each pass.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.helpers.lower_view import lower_view
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
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
from triforce.kvcache import FullView, RetrievalConfig, RetrievalView
from triforce.kvcache.retrieval_config import Budget
from triforce.kvcache.selection import POLICIES
from triforce.ragged import ints

torch.set_num_threads(1)

SHORT = settings(max_examples=25, stateful_step_count=12, deadline=None, derandomize=True)

LONG = settings(max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


def test_random_tier_passes_keep_committed_kv() -> None:
    run_state_machine_as_test(Tiers, settings=SHORT)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_tier_passes_keep_committed_kv_long() -> None:
    run_state_machine_as_test(Tiers, settings=LONG)


@pytest.mark.parametrize("mutant", caught_in("test_view_mutant_breaks_law"), ids=str)
def test_view_mutant_breaks_law(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    once = settings(SHORT, max_examples=100, phases=[Phase.generate], report_multiple_bugs=False, print_blob=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Tiers, settings=once)


def conversation(length: int = 120, policy: str = "observed", **how: Any) -> tuple[FullView, RetrievalView, list[int]]:
    """Return a full view with a prefilled row, a lower view that sees about half of it, and the ids."""
    full, ids = FullView(make_pool(DECODER, 1, CAPACITY)), text(length)
    prefill(DECODER, full, 0, ids)
    return full, lower_view(full, POLICIES[policy], RetrievalConfig(Budget(64), **how)), ids


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [1, 15, 17, 100])
def test_covering_budget_equals_full_view(policy: str, length: int) -> None:
    full, ids = FullView(make_pool(DECODER, 1, CAPACITY)), text(length)
    prefill(DECODER, full, 0, ids)
    lower = lower_view(full, POLICIES[policy], RetrievalConfig(Budget(112)))
    draft_tokens = text(5, seed=7)
    logits = feed(DECODER, lower, [draft_tokens])[0]
    torch.testing.assert_close(logits, feed(DECODER, full, [draft_tokens])[0], atol=1e-9, rtol=1e-9)


def test_small_budget_differs_from_full_view() -> None:
    """A budget below the context changes logits, so the law above tests something."""
    full, lower, _ = conversation()
    draft_tokens = text(5, seed=7)
    assert (feed(DECODER, lower, [draft_tokens])[0] - feed(DECODER, full, [draft_tokens])[0]).abs().max() > 0.1


def test_verification_overwrites_lower_view_kv() -> None:
    full, lower, ids = conversation()
    draft_tokens = text(4, seed=8)
    feed(DECODER, lower, [draft_tokens])
    slots_N = full.pool.slots(0, 120, 124)
    approximate = full.pool.kv.keys_LGSD[1][:, slots_N].clone()
    feed(DECODER, full, [draft_tokens])
    assert (approximate - full.pool.kv.keys_LGSD[1][:, slots_N]).abs().max() > 1e-2
    assert_holds(full, 0, dense(DECODER, ids + draft_tokens))


@pytest.mark.parametrize("cut", [119, 90, 40, 20, 0])
@pytest.mark.parametrize("policy", POLICIES)
def test_deep_rewind_leaves_no_old_kv(policy: str, cut: int) -> None:
    """After `rewind(lengths_B)` a row sees at most that many tokens. No earlier selection may survive it."""
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
    draft_tokens = text(3, seed=len(ids))
    logits = feed(DECODER, lower, [draft_tokens])[0]
    cache = dense(DECODER, ids)
    cache.seen = seen_by(lower, 0)
    torch.testing.assert_close(logits, feed(DECODER, cache, [draft_tokens])[0], **CLOSE)


def test_row_shares_pages_and_fork_copies() -> None:
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
    assert full.observations[1] is not full.observations[2]


def test_forked_row_selects_like_original() -> None:
    full = FullView(make_pool(DECODER, 2, CAPACITY))
    prefill(DECODER, full, 0, text(130))
    lower = lower_view(full, POLICIES["observed"], RetrievalConfig(Budget(64)))
    full.fork(0, 1)
    lower.fork(0, 1)
    logits = feed(DECODER, lower, [[1, 2], [1, 2]])
    torch.testing.assert_close(logits[0], logits[1], atol=1e-9, rtol=1e-9)


def test_dense_oracle_in_pieces_equals_one_pass() -> None:
    """Test of the oracle: the dense cache fed in pieces, with a rewind between, equals one pass."""
    ids, cache = text(40), Dense(DECODER.config)
    feed(DECODER, cache, [[*ids[:20], 5, 6]])
    cache.cut(20)
    pieces = feed(DECODER, cache, [ids[20:]])[0]
    torch.testing.assert_close(pieces, feed(DECODER, Dense(DECODER.config), [ids])[0][20:], **CLOSE)

"""The page pool: no page is lost or shared, and no KV of a former row is visible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.helpers.lower_view import lower_view
from tests.helpers.simple_cache import DEVICE
from tests.helpers.small_decoder import (
    CLOSE,
    assert_holds,
    dense,
    feed,
    make_pool,
    poison,
    prefill,
    small_decoder,
    text,
)
from triforce.backends.kernel_api import pages_for
from triforce.errors import CacheError
from triforce.kvcache import PAGE, FullView, PagePool, RetrievalConfig
from triforce.kvcache.retrieval_config import Budget
from triforce.kvcache.selection import POLICIES, Recent

torch.set_num_threads(1)
DECODER = small_decoder()
PAGES = 12
ROWS = 4


def pool_of(pages: int = PAGES, rows: int = ROWS) -> PagePool:
    return PagePool(DECODER.config, rows, pages, DECODER.dtype, DECODER.device)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (PAGE, 1), (PAGE + 1, 2), (10 * PAGE, 10)])
def test_pages_for_rounds_up(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages


class Pages(RuleBasedStateMachine):
    """Run any sequence of reservations and releases."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of()
        self.held = [0] * ROWS

    @rule(b=st.integers(0, ROWS - 1), tokens=st.integers(0, PAGES * PAGE))
    def reserve(self, b: int, tokens: int) -> None:
        previous_tables = [list(table) for table in self.pool.tables]
        needed_pages = max(self.held[b], pages_for(tokens))
        if needed_pages - self.held[b] > self.pool.free_pages:
            with pytest.raises(CacheError, match="free pages"):
                self.pool.reserve(b, tokens)
            assert self.pool.tables == previous_tables
            return
        self.pool.reserve(b, tokens)
        assert self.pool.tables[b][: self.held[b]] == previous_tables[b], "what a row has stays where it is"
        self.held[b] = needed_pages
        assert all(self.pool.tables[a] == previous_tables[a] for a in range(ROWS) if a != b)

    @precondition(lambda self: any(self.held))
    @rule(b=st.integers(0, ROWS - 1))
    def release(self, b: int) -> None:
        self.pool.lengths_B[b] = 5
        self.pool.release(b)
        self.held[b] = 0
        assert int(self.pool.lengths_B[b]) == 0

    @invariant()
    def every_page_has_one_place(self) -> None:
        tables = self.pool.tables
        assert [len(table) for table in tables] == self.held
        allocated_pages = [page for table in tables for page in table]
        assert len(set(allocated_pages)) == len(allocated_pages) and set(allocated_pages) <= set(range(1, PAGES + 1)), (
            "page 0 is scratch"
        )
        assert self.pool.free_pages == PAGES - len(allocated_pages)

    @invariant()
    def slots_follow_the_table(self) -> None:
        for b, table in enumerate(self.pool.tables):
            expected_slots = [page * PAGE + i for page in table for i in range(PAGE)]
            assert self.pool.slots(b, 0, len(expected_slots)).tolist() == expected_slots
            assert self.pool.slots(b, 3, 7).tolist() == expected_slots[3:7]

    def teardown(self) -> None:
        for b in range(ROWS):
            self.pool.release(b)
        assert self.pool.free_pages == PAGES
        self.pool.reserve(0, PAGES * PAGE)
        assert self.pool.free_pages == 0


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)


def test_pages_are_consecutive_when_possible() -> None:
    pool = pool_of()
    pool.reserve(0, 3 * PAGE)
    pool.reserve(1, 2 * PAGE)
    pool.reserve(2, 2 * PAGE)
    pool.release(1)
    pool.reserve(3, 3 * PAGE)  # the hole of two is too small
    assert pool.tables[3] == list(range(pool.tables[3][0], pool.tables[3][0] + 3))
    pool.reserve(0, 5 * PAGE)  # the hole just fits behind row 0
    assert pool.tables[0] == list(range(pool.tables[0][0], pool.tables[0][0] + 5))


def test_row_grows_in_place_despite_hole() -> None:
    pool = pool_of()
    for b in range(3):
        pool.reserve(b, 2 * PAGE)
    pool.release(0)
    pool.reserve(2, 3 * PAGE)
    assert pool.tables[2] == [5, 6, 7]


def test_consecutive_span_is_view() -> None:
    pool = make_pool(DECODER, 2, 40)
    assert pool.span(0, 1, 0, 40)[0].untyped_storage().data_ptr() == pool.kv.keys_LGSD.untyped_storage().data_ptr()


def test_full_pool_raises_and_recovers() -> None:
    """A failed reservation changes nothing: the text in the pool goes on."""
    ids = text(40)
    added_ids = text(5, seed=1)
    pool = make_pool(DECODER, 2, 48)
    full = FullView(pool)
    prefill(DECODER, full, 0, ids)
    state = (
        pool.kv.keys_LGSD.clone(),
        pool.kv.values_LGSD.clone(),
        [list(t) for t in pool.tables],
        pool.lengths_B.copy(),
    )
    with pytest.raises(CacheError, match="0 free pages of 16 tokens, and this row needs 1"):
        pool.reserve(0, 49)
    assert torch.equal(state[0].nan_to_num(9), pool.kv.keys_LGSD.nan_to_num(9))
    assert torch.equal(state[1].nan_to_num(9), pool.kv.values_LGSD.nan_to_num(9))
    assert state[2] == pool.tables and (state[3] == pool.lengths_B).all() and pool.free_pages == 0
    got = feed(DECODER, full.row(0), [added_ids])[0]
    torch.testing.assert_close(got, feed(DECODER, dense(DECODER, ids), [added_ids])[0], **CLOSE)


@pytest.mark.parametrize("policy", ["recent", *POLICIES])
def test_fragmented_rows_equal_consecutive_rows(policy: str) -> None:
    make = {"recent": Recent, **POLICIES}[policy]
    prompts = [text(70), text(131, seed=1)]
    drafts = [text(3, seed=2), text(5, seed=3)]
    truth = text(6, seed=4)
    results = []
    for fragmented in (False, True):
        full = FullView(make_pool(DECODER, 2, 160, fragmented=fragmented))
        assert (full.pool.tables[0] != list(range(1, 11))) == fragmented
        for b, prompt in enumerate(prompts):
            prefill(DECODER, full, b, prompt)
        lower = lower_view(full, make, RetrievalConfig(Budget(32)))
        logits = [*feed(DECODER, lower, drafts), *feed(DECODER, full, [truth[:4], truth])]
        lower.rewind(full.lengths_B)
        results.append(torch.cat([*logits, *feed(DECODER, lower, drafts)]))
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("policy", ["recent", *POLICIES])
@pytest.mark.parametrize("fragmented", [False, True])
def test_recycled_pages_hide_old_kv(policy: str, fragmented: bool) -> None:
    """Pages of former rows and the scratch page hold NaN, so that any read of them would spread it."""
    make = {"recent": Recent, **POLICIES}[policy]
    pool = make_pool(DECODER, 2, 100, fragmented=fragmented)
    prefill(DECODER, FullView(pool), 0, text(90, seed=5))
    pool.release(0)
    poison(pool, torch.arange(PAGE))
    taken = set(pool.tables[1])
    free = [page * PAGE + i for page in range(1, 15) if page not in taken for i in range(PAGE)]
    poison(pool, torch.tensor(free))
    pool.reserve(0, 100)
    full = FullView(pool)
    ids = text(81, seed=6)
    prefill(DECODER, full, 0, ids)
    assert_holds(full, 0, dense(DECODER, ids))
    lower = lower_view(full, make, RetrievalConfig(Budget(32)))
    committed = list(ids)
    for step in range(4):
        draft_tokens = text(3, seed=step)
        (low, _) = feed(DECODER, lower, [draft_tokens, []], padding=2)
        assert low.isfinite().all()
        (got, _) = feed(DECODER, full, [draft_tokens, []], padding=2)  # padding of row 1 goes to scratch
        torch.testing.assert_close(got, feed(DECODER, dense(DECODER, committed), [draft_tokens])[0], **CLOSE)
        committed += draft_tokens[:2]
        full.rewind(torch.tensor([len(committed), 0], device=DEVICE))
        lower.rewind(full.lengths_B)
        poison(pool, torch.cat([pool.slots(0, len(committed), 100), torch.arange(PAGE, device=DEVICE)]))
    assert_holds(full, 0, dense(DECODER, committed))


def test_row_writes_leave_others_unchanged() -> None:
    pool = make_pool(DECODER, 3, 48, fragmented=True)
    full = FullView(pool)
    prompts = [text(20 + 7 * b, seed=b) for b in range(3)]
    for b, prompt in enumerate(prompts):
        prefill(DECODER, full, b, prompt)
    for b, prompt in enumerate(prompts):
        assert_holds(full, b, dense(DECODER, prompt))


def test_pool_view_of_some_rows_equals_whole() -> None:
    """`FullView` takes any range of rows. The observations that it creates must have their shape."""
    pool = make_pool(DECODER, 3, 64)
    ids = text(50)
    part = FullView(pool)
    part.rows = range(1, 3)
    prefill(DECODER, part, 1, ids)
    assert pool.lengths_B.tolist() == [0, 0, 50]
    assert_holds(part, 1, dense(DECODER, ids))
    lower = lower_view(part, POLICIES["observed"], RetrievalConfig(Budget(32)))
    assert feed(DECODER, lower, [[], [1, 2]])[1].isfinite().all()

"""The order of eviction: by a counter, ends before beginnings, entries used once before entries used again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from triforce.disk_cache.entry_store import PROTECTED_SHARE, StoredEntry, entries_to_evict, order_of, place_of


def held(order: int, index: int = 0, again: bool = False, size: int = 10) -> StoredEntry:
    return StoredEntry(f"{order}.{index}", size, place_of(order, index, again))


def names(entries: list[StoredEntry]) -> list[str]:
    return [entry.name for entry in entries]


def test_end_of_oldest_text_goes_first() -> None:
    entries = [held(order, index) for order in (1, 2) for index in range(3)]
    assert names(entries_to_evict(entries, 20)) == ["1.2", "1.1", "1.0", "2.2"]


def test_nothing_is_dropped_that_fits() -> None:
    assert entries_to_evict([held(1), held(2)], 20) == []


def test_large_texts_read_once_leave_one_that_was_used_again() -> None:
    """There are ten large texts, each as large as all that fits beside the reused one."""
    entries = [held(1, index, again=True) for index in range(4)]
    for order in range(2, 12):
        entries += [held(order, index) for index in range(9)]
        dropped = entries_to_evict(entries, 100)
        entries = [entry for entry in entries if entry not in dropped]
    assert {entry.name for entry in entries} >= {f"1.{index}" for index in range(4)}


def test_new_text_finds_room_among_entries_used_again() -> None:
    entries = [held(1, index, again=True) for index in range(10)] + [held(2)]
    assert "2.0" not in names(entries_to_evict(entries, 100)) and len(entries_to_evict(entries, 100)) == 1


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9), st.booleans(), st.integers(1, 30))), st.integers(0, 400)
)
def test_eviction_leaves_what_fits_and_drops_no_more(drawn: list[tuple[int, int, bool, int]], max_bytes: int) -> None:
    entries = [
        StoredEntry(str(i), size, place_of(order, index, again)) for i, (order, index, again, size) in enumerate(drawn)
    ]
    dropped = entries_to_evict(entries, max_bytes)
    remaining_bytes = sum(entry.bytes for entry in entries) - sum(entry.bytes for entry in dropped)
    assert remaining_bytes <= max_bytes
    assert not dropped or remaining_bytes + dropped[-1].bytes > max_bytes
    assert len(set(names(dropped))) == len(dropped)


@given(st.integers(1, 2**32), st.integers(0, 2**32), st.booleans())
def test_place_holds_its_order_and_use(order: int, index: int, again: bool) -> None:
    place = place_of(order, index, again)
    assert order_of(place) == order and place < 2**63
    assert place_of(order, index, True) > place_of(order, index, False) >= place_of(order, index + 1, False)
    assert 0 < PROTECTED_SHARE < 1

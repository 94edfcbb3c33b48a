"""The draft's view against a token-by-token StreamingLLM: keys rotate by true positions, and queries twice."""

from __future__ import annotations

from random import Random

import pytest
import torch

from tests.helpers.small_decoder import DTYPE, feed, prefill, small_decoder, text
from tests.helpers.streaming_reference import (
    DECODER,
    IDS,
    SINKS,
    SLACK,
    SLOW,
    WINDOW,
    in_pieces,
    same,
    slow_logits,
    view,
)
from triforce.arrays import dtype_name
from triforce.kvcache import PAGE
from triforce.ragged import ints

torch.set_num_threads(1)


def test_streaming_window_changes_logits() -> None:
    """Another window, or other sinks, change logits, so that the tests below test something."""
    assert (slow_logits(IDS, window=WINDOW + 1)[-1] - SLOW[-1]).abs().max() > 1e-2
    assert (slow_logits(IDS, sinks=SINKS + 1, window=WINDOW - 1)[-1] - SLOW[-1]).abs().max() > 1e-2


@pytest.mark.parametrize("seed", range(6))
def test_streaming_any_passes_equal_reference(seed: int) -> None:
    """The text passes the sinks, the first wrap of the ring (at 4 + 9 + 6 = 19) and three more."""
    same(in_pieces(view(), IDS, Random(seed)), SLOW)


@pytest.mark.parametrize("width", [1, 2, 5, 6])
def test_streaming_equal_widths_equal_reference(width: int) -> None:
    cache = view()
    same(torch.cat([feed(DECODER, cache, [IDS[i : i + width]])[0] for i in range(0, 70, width)]), SLOW)


@pytest.mark.parametrize(("sinks", "window", "slack"), [(0, 5, 3), (1, 1, 1), (16, 3, 2), (4, 40, 1), (5, 7, 70)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_streaming_other_sizes_equal_reference(sinks: int, window: int, slack: int, kv_heads: int) -> None:
    decoder = small_decoder(seed=1, kv_heads=kv_heads)
    ids = IDS[:50]
    cache = view(decoder=decoder, slack=slack, window=window, sinks=sinks)
    same(in_pieces(cache, ids, Random(1), decoder), slow_logits(ids, decoder, window, sinks))


def test_streaming_long_text_stays_close() -> None:
    """Float32 rotations of true positions lose little against rotations of places, at positions in the hundreds."""
    ids = text(700, seed=3)
    decoder = small_decoder(layers=2)
    same(in_pieces(view(decoder=decoder, slack=32), ids, Random(0), decoder)[-60:], slow_logits(ids, decoder)[-60:])


@pytest.mark.parametrize("length", [1, SINKS, SINKS + 1, 12, 13, 19, 20, 31, 32, 69])
def test_streaming_prefill_skips_only_unseen_tokens(length: int) -> None:
    """The view continues after `resume` as if it had been fed the whole text."""
    cache = view(2)
    fed = []
    in_pieces(cache.row(0), IDS[:5], Random(0))  # a neighbour
    row = cache.row(1)
    while (steps := row.resume(length))[0] < steps[1]:
        feed(DECODER, row, [IDS[slice(*steps)]])
        fed += range(*steps)
    assert row.lengths_B.tolist() == [length]
    same(in_pieces(row, IDS[length:], Random(1)), SLOW[length:])
    assert len(fed) == len(set(fed)) < SINKS + DECODER.config.layers * WINDOW + row.unit
    assert cache.lengths_B.tolist() == [5, 70]


@pytest.mark.parametrize("length", [17, 30, 41, 60])
def test_streaming_reads_sinks_and_window_alone(length: int) -> None:
    """Skipped tokens are not seen, whatever their slots hold, and their absence does not last."""
    ids = [*IDS, *text(50, seed=4)]
    logits = []
    for value in (0.0, 1e6):
        cache = view(read_tokens=WINDOW)
        cache.kv.values_LGSD[...] = value
        fed = 0
        while (span := cache.resume(length))[0] < span[1]:
            feed(DECODER, cache, [ids[slice(*span)]])
            fed += span[1] - span[0]
        assert cache.lengths_B.tolist() == [length] and fed < SINKS + WINDOW + cache.unit
        logits.append(in_pieces(cache, ids[length:], Random(1)))
    assert torch.equal(*logits)
    exact = slow_logits(ids)[length:]
    settled = DECODER.config.layers * WINDOW
    assert (logits[0][:4] - exact[:4]).abs().max() > 1e-4 or length < SINKS + WINDOW + cache.unit
    same(logits[0][settled:], exact[settled:])


def test_streaming_skipped_tokens_follow_row() -> None:
    """A row that has skipped tokens keeps its place when it is copied, swapped, moved or joined."""
    alone = view(read_tokens=WINDOW)
    prefill(DECODER, alone, 0, IDS[:50])
    expected = feed(DECODER, alone, [IDS[50:55]])[0]
    cache = view(3, read_tokens=WINDOW)
    prefill(DECODER, cache, 1, IDS[:50])
    cache.fork(1, 2)
    swapped = cache.swap_out(1)
    cache.select([2, 0])
    cache.swap_in(1, swapped)
    for logits in feed(DECODER, cache, [IDS[50:55], IDS[50:55]]):
        same(logits, expected)
    cache.rewind(ints([50, 50]))
    joined = cache.new_rows(0)
    joined.join(cache)
    same(feed(DECODER, joined, [IDS[50:55], IDS[50:55]])[1], expected)


@pytest.mark.parametrize("change", [1, 3, SLACK, SLACK + 1, 20, 60, 66, 69])
def test_streaming_resume_follows_changed_text(change: int) -> None:
    """All but the last `change` tokens are shared. Within the slack only the rest is fed, else the whole window."""
    cache = view()
    prefill(DECODER, cache, 0, text(70, seed=0)[: 70 - change] + text(change, seed=9))
    cache.rewind(ints([70 - change]))
    longer = IDS + text(40, seed=10)
    prefill(DECODER, cache, 0, longer[:90])
    same(feed(DECODER, cache, [longer[90:95]])[0], slow_logits(longer[:95])[90:])


@pytest.mark.parametrize("overwritten", [0, 1, 2, 10])
def test_streaming_overwritten_window_is_fed_again(overwritten: int) -> None:
    """A rewind beyond the slack loses the tokens before it too, even if decoding resumes a little further on."""
    cache = view()
    length = 50
    prefill(DECODER, cache, 0, [*IDS[:length], *text(20, seed=12)])
    cache.rewind(ints([length]))
    prefill(DECODER, cache, 0, IDS[: length + overwritten])
    assert cache.lengths_B.tolist() == [length + overwritten]
    same(
        feed(DECODER, cache, [IDS[length + overwritten : length + overwritten + 5]])[0],
        SLOW[length + overwritten : length + overwritten + 5],
    )


def test_streaming_resume_after_cut_into_sinks() -> None:
    cache = view()
    replacement = text(60, seed=11)
    prefill(DECODER, cache, 0, IDS)
    cache.rewind(ints([2]))
    changed = IDS[:2] + replacement
    prefill(DECODER, cache, 0, changed)
    same(feed(DECODER, cache, [[1, 2]])[0], slow_logits([*changed, 1, 2])[-2:])


def test_streaming_rows_are_independent() -> None:
    """Each of several ragged rows in one pass, one of them empty, is as if it were alone. Padding changes no row."""
    cache = view(4)
    lengths = [0, 3, 25, 60]
    for b, length in enumerate(lengths):
        prefill(DECODER, cache, b, text(70, seed=b)[:length])
    for step in range(8):
        counts = [(step + b) % 4 for b in range(4)]
        fed = [text(70, seed=b)[n : n + count] for b, (n, count) in enumerate(zip(lengths, counts, strict=True))]
        logits = feed(DECODER, cache, fed, padding=2)
        for b in range(4):
            lengths[b] += len(fed[b])
            expected = slow_logits(text(70, seed=b)[: lengths[b]])[-len(fed[b]) :] if fed[b] else logits[b]
            same(logits[b], expected)
            assert logits[b].isfinite().all()


def test_streaming_all_padding_pass_is_finite() -> None:
    cache = view(2)
    ids_BT = ints([1, 2, 3, 4]).reshape(2, 2)
    assert DECODER(ids_BT, ints([0, 0]), cache).isfinite().all()
    same(in_pieces(cache.row(0), IDS, Random(0)), SLOW)


def test_streaming_fork_copies_state() -> None:
    cache = view(3)
    in_pieces(cache.row(2), IDS[:30], Random(0))
    cache.fork(2, 0)
    assert cache.lengths_B.tolist() == [30, 0, 30]
    feed(DECODER, cache, [text(4, seed=7), [], []])  # the copy goes its own way
    same(feed(DECODER, cache, [[], [], IDS[30:36]])[2], SLOW[30:36])
    cache.rewind(ints([30, 0, 36]))
    same(feed(DECODER, cache, [IDS[30:36], [], []])[0], SLOW[30:36])


def test_streaming_memory_is_constant() -> None:
    cache = view()
    initial_shape = cache.kv.keys_LGSD.shape
    in_pieces(cache, IDS, Random(0))
    assert cache.kv.keys_LGSD.shape == initial_shape
    assert initial_shape[2] <= SINKS + WINDOW + SLACK + 3 * PAGE  # scratch, a unit more, and the rest of a page
    assert dtype_name(cache.kv.keys_LGSD) == DTYPE

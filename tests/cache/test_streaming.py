"""The draft's view against StreamingLLM written out token by token.

The slow path keeps every key unrotated, gathers [sinks | window] for each query, and rotates each key to its place in
that list, as Xiao et al. 2023 describe it; the view rotates by true positions and turns the query twice.
"""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from simple_cache import DEVICE
from small import CLOSE, DTYPE, VOCAB, feed, longs, prefill, small_decoder, text, turn, weigh
from torch import Tensor

from triforce.cache import PAGE, Streaming
from triforce.config import ModelConfig
from triforce.decoder import Decoder
from triforce.errors import CacheError
from triforce.kernels import Model, layer_by_layer
from triforce.shapes import Ints, ints

torch.set_num_threads(1)
DECODER = small_decoder(layers=3)
SINKS, WINDOW, SLACK = 4, 9, 6


class Slow:
    """One row; nothing is ever forgotten but by `cut`."""

    def __init__(self, config: ModelConfig, sinks: int, window: int) -> None:
        self.config, self.sinks, self.window, self.length = config, sinks, window, 0
        self.keys: list[list[Tensor]] = [[] for _ in range(config.layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(config.layers)]

    def begin(self, counts_B: Ints, width: int) -> None:
        assert counts_B.tolist() == [width]

    def forward(self, model: Model, ids_BT: Tensor, at_BJ: Tensor | None) -> Tensor:
        return layer_by_layer(model, ids_BT, at_BJ, self.attend)

    def attend(self, layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        del keys[self.length :], values[self.length :]
        keys += k_BTGD[0].double()
        values += v_BTGD[0].double()
        mixed = [self._mix(keys, values, self.length + t, q_HD) for t, q_HD in enumerate(q_BTHD[0])]
        return torch.stack(mixed)[None].to(q_BTHD.dtype)

    def _mix(self, keys: list[Tensor], values: list[Tensor], position: int, q_HD: Tensor) -> Tensor:
        first = max(self.sinks, position - self.window + 1)
        seen = [*range(min(self.sinks, position + 1)), *range(first, position + 1)]
        k_NGD, v_NGD = (torch.stack([memory[n] for n in seen]) for memory in (keys, values))
        k_NGD = turn(k_NGD, self.config.rope, range(len(seen)))
        q_HD = turn(q_HD[None], self.config.rope, [len(seen) - 1])[0]
        group = self.config.heads // self.config.kv_heads
        all_1N = torch.ones(1, len(seen), dtype=torch.bool, device=DEVICE)
        return torch.cat(
            [
                weigh(q_HD[h : h + 1], k_NGD[:, h // group], all_1N) @ v_NGD[:, h // group]
                for h in range(self.config.heads)
            ]
        )

    def advance(self, counts_B: Ints) -> None:
        self.length += int(counts_B[0])


def view(
    rows: int = 1, decoder: Decoder = DECODER, slack: int = SLACK, window: int = WINDOW, sinks: int = SINKS
) -> Streaming:
    return Streaming(decoder.config, rows, sinks, window, slack, decoder.dtype, decoder.device)


def slow_logits(ids: list[int], decoder: Decoder = DECODER, window: int = WINDOW, sinks: int = SINKS) -> Tensor:
    return feed(decoder, Slow(decoder.config, sinks, window), [ids])[0]


def in_pieces(cache: Streaming, ids: list[int], chance: Random, decoder: Decoder = DECODER) -> Tensor:
    """The logits of a text fed in passes of any size."""
    logits = []
    while ids:
        count = chance.randint(1, cache.slack)
        logits += feed(decoder, cache, [ids[:count]])
        ids = ids[count:]
    return torch.cat(logits)


def same(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, **CLOSE)


FAR = 120
"""Tokens behind which the two ways to rotate may differ by more than `CLOSE`, where a token's attention is touchy."""
IDS = text(70)
SLOW = slow_logits(IDS)


def test_the_window_matters() -> None:
    """Else every test below would pass with any window."""
    assert (slow_logits(IDS, window=WINDOW + 1)[-1] - SLOW[-1]).abs().max() > 1e-2
    assert (slow_logits(IDS, sinks=SINKS + 1, window=WINDOW - 1)[-1] - SLOW[-1]).abs().max() > 1e-2


@pytest.mark.parametrize("seed", range(6))
def test_however_the_text_is_cut_into_passes(seed: int) -> None:
    """Through sinks, the first wrap of the ring (at 4 + 9 + 6 = 19) and three more."""
    same(in_pieces(view(), IDS, Random(seed)), SLOW)


@pytest.mark.parametrize("width", [1, 2, 5, 6])
def test_passes_of_one_width(width: int) -> None:
    cache = view()
    same(torch.cat([feed(DECODER, cache, [IDS[i : i + width]])[0] for i in range(0, 70, width)]), SLOW)


@pytest.mark.parametrize(("sinks", "window", "slack"), [(0, 5, 3), (1, 1, 1), (16, 3, 2), (4, 40, 1), (5, 7, 70)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_other_sizes(sinks: int, window: int, slack: int, kv_heads: int) -> None:
    decoder = small_decoder(seed=1, kv_heads=kv_heads)
    ids = IDS[:50]
    cache = view(decoder=decoder, slack=slack, window=window, sinks=sinks)
    same(in_pieces(cache, ids, Random(1), decoder), slow_logits(ids, decoder, window, sinks))


def test_a_long_text_stays_close() -> None:
    """Positions in the hundreds: the float32 rotation of true positions loses little against that of places."""
    ids = text(700, seed=3)
    decoder = small_decoder(layers=2)
    same(in_pieces(view(decoder=decoder, slack=32), ids, Random(0), decoder)[-60:], slow_logits(ids, decoder)[-60:])


class Rewinds(RuleBasedStateMachine):
    """Ragged rows that run ahead and are taken back, each by its own amount, never by more than the slack."""

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
            least = max(0, self.highest[b] - SLACK)
            kept = chance.randint(min(least, len(ids)), len(ids))
            del ids[kept:]
            self.slow[b].length = kept
        self.cache.rewind(ints([*map(len, self.texts)]))
        self._spoil()

    def _spoil(self) -> None:
        """What was taken back is overwritten with large numbers: whoever still saw it would show it."""
        for b, ids in enumerate(self.texts):
            for position in range(len(ids), self.highest[b]):
                place = position if position < SINKS else SINKS + (position - SINKS) % self.cache.ring
                slot = (1 + b * self.cache.pages) * PAGE + place
                self.cache.memory.keys_LGSD[:, :, slot] = 30.0
                self.cache.memory.values_LGSD[:, :, slot] = 1e6

    @invariant()
    def lengths_are_the_texts(self) -> None:
        if hasattr(self, "slow"):
            assert self.cache.lengths_B.tolist() == [len(ids) for ids in self.texts]


def test_what_is_taken_back_was_never_there() -> None:
    run_state_machine_as_test(
        Rewinds, settings=settings(max_examples=20, stateful_step_count=15, deadline=None, derandomize=True)
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_is_taken_back_was_never_there_at_length() -> None:
    run_state_machine_as_test(Rewinds, settings=settings(max_examples=200, stateful_step_count=50, deadline=None))


@pytest.mark.parametrize("length", [3, 12, 19, 20, 40])
def test_the_whole_slack_may_be_taken_back(length: int) -> None:
    cache = view()
    in_pieces(cache, IDS[:length], Random(0))
    feed(DECODER, cache, [text(SLACK, seed=5)])
    cache.rewind(ints([length]))
    same(feed(DECODER, cache, [IDS[length : length + SLACK]])[0], SLOW[length : length + SLACK])


@pytest.mark.parametrize("back", [1, 2, 30])
def test_taking_back_more_than_the_slack_is_refused(back: int) -> None:
    cache = view()
    in_pieces(cache, IDS[:40], Random(0))
    cache.rewind(ints([40 - SLACK - back]))
    with pytest.raises(CacheError, match="slack 6"):
        feed(DECODER, cache, [[1]])
    assert cache.lengths_B.tolist() == [40 - SLACK - back]


def test_running_ahead_by_more_than_the_slack_is_refused() -> None:
    cache = view(2)
    with pytest.raises(CacheError, match="slack 6"):
        feed(DECODER, cache, [[1], IDS[: SLACK + 1]])
    assert cache.lengths_B.tolist() == [0, 0]
    same(in_pieces(cache.row(1), IDS, Random(0)), SLOW)


def test_a_row_that_is_done_may_lie_far_back() -> None:
    """Only rows that are fed are asked about their slack."""
    cache = view(2)
    in_pieces(cache.row(0), IDS[:40], Random(0))
    in_pieces(cache.row(1), IDS[:40], Random(0))
    cache.rewind(ints([10, 40]))
    same(feed(DECODER, cache, [[], IDS[40:42]])[1], SLOW[40:42])


@pytest.mark.parametrize("length", [1, SINKS, SINKS + 1, 12, 13, 19, 20, 31, 32, 69])
def test_prefill_skips_only_what_cannot_be_seen(length: int) -> None:
    """After `resume` the view goes on as if it had been fed the whole text."""
    cache, fed = view(2), []
    in_pieces(cache.row(0), IDS[:5], Random(0))  # a neighbour
    row = cache.row(1)
    while (steps := row.resume(length))[0] < steps[1]:
        feed(DECODER, row, [IDS[slice(*steps)]])
        fed += range(*steps)
    assert row.lengths_B.tolist() == [length]
    same(in_pieces(row, IDS[length:], Random(1)), SLOW[length:])
    assert len(fed) == len(set(fed)) <= SINKS + DECODER.config.layers * WINDOW
    assert cache.lengths_B.tolist() == [5, 70]


@pytest.mark.parametrize("change", [1, 3, SLACK, SLACK + 1, 20, 60, 66, 69])
def test_resume_goes_on_with_a_changed_text(change: int) -> None:
    """All but the last `change` tokens are shared: within the slack the rest is fed, else the window anew."""
    cache = view()
    prefill(DECODER, cache, 0, text(70, seed=0)[: 70 - change] + text(change, seed=9))
    cache.rewind(ints([70 - change]))
    longer = IDS + text(40, seed=10)
    prefill(DECODER, cache, 0, longer[:90])
    same(feed(DECODER, cache, [longer[90:95]])[0], slow_logits(longer[:95])[90:])


@pytest.mark.parametrize("ahead", [0, 1, 2, 10])
def test_a_window_that_was_overwritten_is_fed_anew(ahead: int) -> None:
    """Taken back by more than the slack, and wanted only a little further on: what lies before is gone as well."""
    cache, length = view(), 50
    prefill(DECODER, cache, 0, [*IDS[:length], *text(20, seed=12)])
    cache.rewind(ints([length]))
    prefill(DECODER, cache, 0, IDS[: length + ahead])
    assert cache.lengths_B.tolist() == [length + ahead]
    same(feed(DECODER, cache, [IDS[length + ahead : length + ahead + 5]])[0], SLOW[length + ahead : length + ahead + 5])


def test_resume_after_a_cut_into_the_sinks() -> None:
    cache, other = view(), text(60, seed=11)
    prefill(DECODER, cache, 0, IDS)
    cache.rewind(ints([2]))
    changed = IDS[:2] + other
    prefill(DECODER, cache, 0, changed)
    same(feed(DECODER, cache, [[1, 2]])[0], slow_logits([*changed, 1, 2])[-2:])


def test_rows_do_not_meet() -> None:
    """Ragged rows, one of them still empty, in one pass: each as if it were alone. Padding harms nobody."""
    cache, lengths = view(4), [0, 3, 25, 60]
    for b, length in enumerate(lengths):
        prefill(DECODER, cache, b, text(70, seed=b)[:length])
    for step in range(8):
        counts = [(step + b) % 4 for b in range(4)]
        fed = [text(70, seed=b)[n : n + count] for b, (n, count) in enumerate(zip(lengths, counts, strict=True))]
        logits = feed(DECODER, cache, fed, padding=2)
        for b in range(4):
            lengths[b] += len(fed[b])
            wanted = slow_logits(text(70, seed=b)[: lengths[b]])[-len(fed[b]) :] if fed[b] else logits[b]
            same(logits[b], wanted)
            assert logits[b].isfinite().all()


def test_a_pass_of_nothing_but_padding_is_finite() -> None:
    cache = view(2)
    ids_BT = longs([1, 2, 3, 4]).view(2, 2)
    cache.begin(ints([0, 0]), 2)
    assert DECODER(ids_BT, cache).isfinite().all()
    same(in_pieces(cache.row(0), IDS, Random(0)), SLOW)


def test_fork_copies() -> None:
    cache = view(3)
    in_pieces(cache.row(2), IDS[:30], Random(0))
    cache.fork(2, 0)
    assert cache.lengths_B.tolist() == [30, 0, 30]
    feed(DECODER, cache, [text(4, seed=7), [], []])  # the copy goes its own way
    same(feed(DECODER, cache, [[], [], IDS[30:36]])[2], SLOW[30:36])
    cache.rewind(ints([30, 0, 36]))
    same(feed(DECODER, cache, [IDS[30:36], [], []])[0], SLOW[30:36])


def test_memory_does_not_grow() -> None:
    cache = view()
    before = cache.memory.keys_LGSD.shape
    in_pieces(cache, IDS, Random(0))
    assert cache.memory.keys_LGSD.shape == before
    assert before[2] <= SINKS + WINDOW + SLACK + 3 * PAGE  # scratch, a unit more, and the rest of a page
    assert cache.memory.keys_LGSD.dtype == DTYPE

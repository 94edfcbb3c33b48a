"""The retrieval view: when it refreshes its selection, what it selects, and how much of the context is visible."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.lower_view import lower_view
from tests.helpers.simple_cache import DEVICE
from tests.helpers.small_decoder import CLOSE, dense, feed, make_pool, prefill, slots_of, text
from tests.kvcache.views.test_retrieval_texts import DECODER
from triforce.kvcache import PAGE, FullView, RetrievalConfig
from triforce.kvcache.retrieval_config import Budget
from triforce.kvcache.selection import POLICIES, Policy, Recent
from triforce.ragged import ints

torch.set_num_threads(1)


ALL: dict[str, Callable[[], Policy]] = {**POLICIES, "recent": Recent}


class Spy:
    observes = True
    """Pick the first candidates, and record each call."""

    def __init__(self, share: int = 8) -> None:
        self.share = share
        self.asked = []

    def latest_tokens(self, budget: int) -> int:
        return budget // self.share

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        committed = int(full.lengths_B[row])
        assert candidates.stop * chunk <= committed, "only full committed chunks"
        assert 0 <= picks <= len(candidates)
        self.asked.append((committed, candidates, picks))
        ids_N = torch.arange(candidates.start, candidates.start + picks, device=DEVICE)
        return ids_N.expand(full.pool.config.layers, full.pool.config.kv_heads, -1)


class Rounds:
    """One row of a batch of two, and the passes that its tiers would run."""

    def __init__(self, length: int = 120, **setting: Any) -> None:
        self.full = FullView(make_pool(DECODER, 2, 608))
        self.spy = Spy()
        self.text = text(length)
        prefill(DECODER, self.full, 1, self.text)
        self.lower = lower_view(self.full, lambda: self.spy, RetrievalConfig(**({"budget": Budget(64)} | setting)))

    @property
    def selections(self) -> int:
        return len(self.spy.asked)

    def round(self, drafted: int = 3, accepted: int | None = None, inner: int | None = None) -> None:
        """Draft `drafted` tokens by the lower tier, the last one not fed; the exact tier keeps `accepted` and adds one.

        inner: number of draft tokens of a tier below that the lower tier feeds and rejects itself.
        """
        accepted = drafted if accepted is None else accepted
        committed = len(self.text)  # the next token of the text is drawn but not fed, as always
        if inner is not None:
            feed(DECODER, self.lower, [[], text(1 + inner)])
            self.lower.rewind(ints([0, committed + 1]))
            feed(DECODER, self.lower, [[], text(drafted - 1)] if drafted > 1 else [[], [1]])
            self.lower.rewind(ints([0, committed + drafted]))
        else:
            for t in range(drafted):
                feed(DECODER, self.lower, [[], [t]])
                self.lower.rewind(ints([0, committed + t + 1]))  # as Tier.commit does
        feed(DECODER, self.full, [[], text(drafted + 1)])
        self.text += text(accepted + 1)
        lengths_B = ints([0, len(self.text)])
        self.full.rewind(lengths_B)
        self.lower.rewind(lengths_B)


@pytest.mark.parametrize(("refresh", "selections"), [(0, 1), (1, 7), (2, 4), (3, 3)])
def test_refresh_counts_verifications(refresh: int, selections: int) -> None:
    rounds = Rounds(refresh=refresh)
    for _ in range(7):
        rounds.round(accepted=1)
    assert rounds.selections == selections


def test_refresh_auto_waits_for_rejection() -> None:
    rounds = Rounds(refresh=None)
    counts = []
    for accepted in (3, 3, 2, 3, 0, 0, 3, 3):
        rounds.round(drafted=3, accepted=accepted)
        counts.append(rounds.selections)
    assert counts == [1, 1, 1, 2, 2, 3, 4, 4]  # one selection at the start, and one after each rejection


def test_rejections_inside_lower_tier_do_not_refresh() -> None:
    rounds = Rounds(refresh=None)
    for _ in range(4):
        rounds.round(drafted=3, inner=2)
    assert rounds.selections == 1


@pytest.mark.parametrize("budget", [32, 64, 112])
@pytest.mark.parametrize("chunk", [1, 8, 16, 32, 100])
def test_selection_keeps_to_budget(budget: int, chunk: int) -> None:
    """Sinks, picks and recent tokens fit the budget together, unless one chunk of each exceeds it."""
    rounds = Rounds(budget=Budget(budget), chunk=chunk)
    for _ in range(20):
        rounds.round(accepted=2)
        choice = rounds.lower.selections[1].pages
        if choice is not None and rounds.spy.asked:
            committed = rounds.spy.asked[-1][0]
            sight = choice.tokens + committed - choice.end
            sinks = -(-PAGE // chunk) * chunk
            assert sight <= max(budget, sinks + budget // 8 + 2 * chunk)
            assert committed - choice.end >= budget // 8
            tokens = [
                rounds.full.pool.slots(1, 0, 600).tolist().index(slot)
                for slot in slots_of(rounds.lower, 1)[0, 0].tolist()
            ]
            assert tokens == sorted(set(tokens)) and tokens[: min(PAGE, len(tokens))] == list(
                range(min(PAGE, len(tokens)))
            )
            assert max(tokens, default=-1) < choice.end


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("chunk", [1, 8, 16, 32, 100])
@pytest.mark.parametrize("length", [33, 40, 65, 100, 128, 129, 200])
def test_retrieval_any_chunk_at_any_length_is_finite(name: str, chunk: int, length: int) -> None:
    """A context a little above the budget has few full chunks to choose from, or none."""
    full = FullView(make_pool(DECODER, 1, 224))
    prefill(DECODER, full, 0, text(length))
    lower = lower_view(full, ALL[name], RetrievalConfig(Budget(32), chunk))
    assert feed(DECODER, lower, [[1, 2, 3]])[0].isfinite().all()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("length", [161, 200, 700])
def test_first_selection_has_observed_queries(name: str, length: int) -> None:
    """Wide prefill passes report no attention, so the prompt's last tokens are fed in a pass of their own."""
    full = FullView(make_pool(DECODER, 1, 720))
    prefill(DECODER, full, 0, text(length))
    lower = lower_view(full, POLICIES[name], RetrievalConfig(Budget(64)))
    feed(DECODER, lower, [[1, 2, 3]])
    choice = lower.selections[0].pages
    assert choice is not None and choice.end >= length - 32 and choice.tokens <= 64
    assert full.observations[0].start + full.observations[0].queries_LTHD.shape[1] == length


def test_searched_layers_see_whole_context() -> None:
    """The view is exact with both layers searched. Its logits differ with either layer searched, and with none."""
    results = []
    for layers in ((), (0,), (1,), (0, 1)):
        full = FullView(make_pool(DECODER, 1, 224))
        prefill(DECODER, full, 0, text(150))
        lower = lower_view(full, POLICIES["observed"], RetrievalConfig(Budget(32), searched_layers=frozenset(layers)))
        results.append(feed(DECODER, lower, [[1, 2, 3]])[0])
    exact = feed(DECODER, dense(DECODER, text(150)), [[1, 2, 3]])[0]
    torch.testing.assert_close(results.pop(), exact, **CLOSE)
    for logits, compared in combinations([*results, exact], 2):
        assert (logits - compared).abs().max() > 1e-2


def test_unobserved_attention_triggers_no_refresh() -> None:
    """Mode auto observes attention only while that pays, and a row may come from a batch that did not observe."""
    full = FullView(make_pool(DECODER, 1, 224))
    prefill(DECODER, full, 0, text(150))
    lower = lower_view(full, POLICIES["observed"], RetrievalConfig(Budget(32)))
    full.grain = 0
    feed(DECODER, full, [[4]])
    everything = feed(DECODER, lower, [[1, 2, 3]])[0]
    torch.testing.assert_close(everything, feed(DECODER, dense(DECODER, [*text(150), 4]), [[1, 2, 3]])[0], **CLOSE)
    assert lower.selections[0].pages is None


def test_relative_budget_grows_with_context() -> None:
    rounds = Rounds(budget=Budget(share=0.5))
    visible = []
    for _ in range(60):
        rounds.round(accepted=3)
        choice = rounds.lower.selections[1].pages
        assert choice is not None
        visible.append(choice.tokens + rounds.spy.asked[-1][0] - choice.end)
    assert visible[0] <= 64 and 160 <= visible[-1] <= 192


@pytest.mark.parametrize("width", [1, 33, 66])
def test_verification_of_any_width_refreshes(width: int) -> None:
    """draft_tokens and speculative_tokens may be 32: a pass of that width must report its attention, too."""
    rounds = Rounds(length=100)
    rounds.round()
    passes_before = rounds.full.observations[1].passes
    feed(DECODER, rounds.full, [[], text(width)])
    assert rounds.full.observations[1].passes == passes_before + 1
    lower = lower_view(rounds.full, POLICIES["observed"], RetrievalConfig(Budget(64)))
    assert feed(DECODER, lower, [[], [1, 2]])[1].isfinite().all()

"""Hindsight: draft tokens that n-gram lookup would have made at earlier places, without changing its state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.simulated_tiers import estimates, values
from triforce.planner import Plan
from triforce.planner.cost_model import KNOWN_TOKENS, MAX_GAMMA, NgramHindsight
from triforce.ragged import ints
from triforce.speculation import NgramProposer, SequenceState
from triforce.speculation.ngram import MIN_MATCH_ALONE, PROMPT_TAIL, STRIDE, NgramIndex

TEXT = np.random.default_rng(1).integers(0, 4, 400)
LOOP = np.resize(np.arange(40), 400)
FRESH = np.arange(400)


def prefix(text: np.ndarray, length: int = 400) -> SequenceState:
    return SequenceState(text[None].copy(), ints([length]))


def match_at(text: np.ndarray, place: int) -> tuple[int, int]:
    """Return the match length at a place of a text cut there, and how many of the next tokens it predicts."""
    grams = NgramIndex(MIN_MATCH_ALONE)
    grams.read(text[:place])
    match, match_end = grams.match(text[:place])
    draft_tokens = np.resize(text[match_end:place], MAX_GAMMA)
    right = draft_tokens == text[place : place + MAX_GAMMA]
    return match, 0 if not match else MAX_GAMMA if right.all() else int(right.argmin())


@pytest.mark.parametrize("text", [TEXT, LOOP, FRESH], ids=["random", "loop", "fresh"])
def test_hindsight_equals_ngram_proposals(text: np.ndarray) -> None:
    lookup = NgramProposer(1)
    assert list(lookup.prefill(prefix(text), 0, 199)) == [199]
    tried = list(lookup.hindsight(prefix(text), 0, MAX_GAMMA))
    places = range(199 - PROMPT_TAIL, 400 - MAX_GAMMA + 1, STRIDE)
    assert tried == [(*match_at(text, place), place >= 199) for place in places]
    assert not list(lookup.hindsight(prefix(text), 0, MAX_GAMMA))  # each place is tried once


def test_hindsight_leaves_no_trace() -> None:
    scanned = NgramProposer(1)
    unscanned = NgramProposer(1)
    for lookup in (scanned, unscanned):
        list(lookup.prefill(prefix(TEXT), 0, 199))
    for length in (230, 310, 260, 400):  # with a rewind in between
        scanned.rewind(prefix(TEXT, length))
        list(scanned.hindsight(prefix(TEXT, length), 0, MAX_GAMMA))
        for lookup in (scanned, unscanned):
            lookup.rewind(prefix(TEXT, length))
            lookup.draft_row(prefix(TEXT, length), 0, MIN_MATCH_ALONE)
        assert scanned.indexes[0].__dict__ == unscanned.indexes[0].__dict__


@pytest.mark.parametrize(("text", "acceptance"), [(LOOP, 1.0), (FRESH, 0.0)], ids=["loop", "fresh"])
def test_hindsight_detects_loop(text: np.ndarray, acceptance: float) -> None:
    lookup = NgramProposer(1)
    list(lookup.prefill(prefix(text), 0, 100))
    hindsight = NgramHindsight(lookup)
    hindsight.update(prefix(text), 0)
    odds = hindsight.odds()
    assert odds.looped_A == pytest.approx(acceptance, abs=0.15) and odds.found_A == pytest.approx(0)
    for gamma in (1, 4, 8, 16):
        assert odds.rounds_AG[1, gamma] == pytest.approx(odds.looped_A[1] / (1 + gamma), rel=0.05)
        assert odds.offered_AG[1, gamma] == pytest.approx(gamma * odds.rounds_AG[1, gamma], rel=0.05)
        assert odds.acceptance(1, gamma) == pytest.approx(acceptance, abs=0.02)


def test_text_half_of_which_repeats_itself_is_read_twice_as_fast() -> None:
    """N-grams predict 8 tokens per place on average, yet every second token needs a proposal of its own."""
    hindsight = NgramHindsight(NgramProposer(1))
    hindsight.places.extend([(64, KNOWN_TOKENS, True), (0, 0, True)] * 48)
    expected = replace(estimates(lambda tier, width: float(tier == "full"), {}), odds=hindsight.odds())
    assert values(expected)[Plan(("ngram", "full"), (16,))] == pytest.approx(2 / (1 + 1 / 17), rel=0.04)


@pytest.mark.parametrize("hits", [0, 3, KNOWN_TOKENS])
def test_odds_tell_acceptance_of_proposals(hits: int) -> None:
    hindsight = NgramHindsight(NgramProposer(1))
    hindsight.places.extend([(8, hits, True)] * 96)
    assert hindsight.odds().acceptance(1, 4) == pytest.approx(min(hits, 4) / 4, abs=0.01)


def test_text_of_its_own_outweighs_prompt() -> None:
    """The prompt repeats itself; eight places of the text do not."""
    prefix = SequenceState(np.concatenate([LOOP[:200], np.arange(100, 172)])[None], ints([200]))
    lookup = NgramProposer(1)
    assert list(lookup.prefill(prefix, 0, 200)) == [200]
    hindsight = NgramHindsight(lookup)
    hindsight.update(prefix, 0)
    (looped_before,) = hindsight.odds().looped_A[1:]
    prefix.lengths_B[0] = 272
    hindsight.update(prefix, 0)
    (looped_after,) = hindsight.odds().looped_A[1:]
    assert looped_before > 0.7 and looped_after < 0.2


def test_prompts_of_all_rows_count_less_than_text() -> None:
    """A second row's prompt counts less than the first row's text, although it is scanned after that text."""
    ids_BS = np.stack([np.concatenate([LOOP[:200], np.arange(100, 172)])] * 2)
    two_rows = SequenceState(ids_BS, ints([200, 200]))
    lookup = NgramProposer(2)
    for b in range(2):
        assert list(lookup.prefill(two_rows, b, 200)) == [200]
    hindsight = NgramHindsight(lookup)
    longer = SequenceState(ids_BS, ints([272, 272]))
    hindsight.update(longer, 0)
    hindsight.update(two_rows, 1)
    assert hindsight.odds().looped_A[1] < 0.4


def test_hindsight_rows_keep_their_places() -> None:
    two_rows = SequenceState(np.stack([TEXT, LOOP]), ints([300, 300]))
    lookup = NgramProposer(2)
    for b in range(2):
        list(lookup.prefill(two_rows, b, 299))
    expected = list(lookup.hindsight(two_rows, 1, MAX_GAMMA))
    again = NgramProposer(2)
    for b in range(2):
        list(again.prefill(two_rows, b, 299))
    again.select([1])
    assert list(again.hindsight(prefix(LOOP, 300), 0, MAX_GAMMA)) == expected
    joined = NgramProposer(1)
    list(joined.prefill(prefix(TEXT), 0, 299))
    joined.join(again)
    assert not list(joined.hindsight(two_rows, 1, MAX_GAMMA))


def test_short_match_before_draft_counts_alone() -> None:
    hindsight = NgramHindsight(NgramProposer(1))
    hindsight.places += [(0, 0, True), (MIN_MATCH_ALONE, 1, True), (0, 0, True)]
    found_A = hindsight.odds().found_A
    assert found_A[1] > 0 and found_A[0] == 0

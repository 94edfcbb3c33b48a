"""N-gram lookup against a search through the whole text, and its behaviour above a draft."""

from __future__ import annotations

import random
import tracemalloc
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from benchmarks.lookup import main as benchmark
from tests.helpers.laws.tiny import MODELS, PROMPTS, V, finished, started
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.sequence_group import prefill_batch
from triforce.engine.tier_builder import MODES, SpeculativeConfig
from triforce.errors import CacheError
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import Bools, ints
from triforce.speculation import Draft, NgramProposer, Rejection, Seeded, SequenceState, Tier, ngram
from triforce.speculation import tier as tier_module
from triforce.speculation.ngram import NgramIndex

LIVE = np.array([True])
PARAMS = SamplingParams(0.8, max_tokens=60)


class Wanted:
    """The part of a sampling that n-gram lookup reads."""

    vocab_size = 10

    def __init__(self, coupling: type = Seeded) -> None:
        self.coupling = coupling(None)
        self.probs_size = self.coupling.probs_size(self.vocab_size)


def longest_match(text: list[int], min_length: int) -> tuple[int, int]:
    """Return, by definition, the length of the longest suffix that also ends earlier, and its latest earlier end."""
    for length in range(len(text) - 1, min_length - 1, -1):
        for match_end in range(len(text) - 1, length - 1, -1):
            if text[match_end - length : match_end] == text[-length:]:
                return length, match_end
    return 0, 0


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_ngram_longest_match_is_found(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "OCCURRENCES", 10**6)
    generator = random.Random(n)
    match_count = 0
    for letters in (1, 2, 4):
        index = NgramIndex(n)
        text = list[int]()
        for _ in range(300):
            if generator.random() < 0.3:  # rewound, with another text from there on
                text = text[: generator.randint(max(0, len(text) - 12), len(text))]
                index.forget(len(text))
            text += generator.choices(range(letters), k=generator.randint(0, 4))
            text = text[:60]
            index.read(ints(text))
            match_count += (match := index.match(ints(text)))[0] > n
            assert match == longest_match(text, n)
    assert match_count > 100


def test_ngram_rewind_leaves_no_trace() -> None:
    text = ints(random.Random(1).choices(range(3), k=200))
    once = NgramIndex(3)
    again = NgramIndex(3)
    once.read(text[:120])
    for end in (200, 150, 140, 190):
        again.read(text[:end])
        again.forget(end - 30)
    again.forget(120)
    assert vars(once) == vars(again)


def test_ngram_frequent_ending_uses_latest_matches() -> None:
    text = [9, 9, 1, 2, 3, *[7, 1, 2, 3] * ngram.OCCURRENCES, 5, 9, 9, 1, 2, 3]
    index = NgramIndex(3)
    index.read(ints(text))
    assert index.match(ints(text)) == (3, len(text) - 6)
    short = text[:5] + text[9:]
    index = NgramIndex(3)
    index.read(ints(short))
    assert index.match(ints(short)) == (5, 5)


def test_ngram_memory_is_linear_in_text() -> None:
    text = np.random.default_rng(0).integers(0, 8192, 40_000)
    tracemalloc.start()
    index = NgramIndex(ngram.MIN_MATCH_ABOVE_DRAFT)
    index.read(text)
    traced_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert traced_bytes < 180 * len(text)
    assert index.match(text) == (0, 0)


def proposed(text: list[int], gamma: int = 4, min_match: int = 3) -> list[int]:
    ids_1S = ints([*text, 0, 0])[None]
    draft = NgramProposer(1, gamma, min_match=min_match).propose(
        SequenceState(ids_1S, ints([len(text)])), Wanted(), LIVE
    )
    assert draft.counts_B[0] == draft.tokens_BK.shape[1] <= gamma
    return draft.tokens_BK[0].tolist()


@pytest.mark.parametrize(
    ("text", "draft_tokens"),
    [
        ([1, 2, 5, 6, 7, 1, 2], []),  # two tokens are no match
        ([1, 2, 3, 5, 6, 7, 1, 2, 3], [5]),
        ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4], [5, 6]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 9, 1, 2, 3, 4, 5, 6, 7, 8], [9, 0, 9, 1]),
        ([1, 2, 3, 5, 0, 1, 2, 3, 6, 0, 8, 1, 2, 3], [6]),  # the latest of equals
        ([0, 1, 2, 3, 5, 9, 1, 2, 3, 6, 9, 0, 1, 2, 3], [5, 9]),  # the longer before the later
        ([8, 4, 4, 4, 4, 4, 4], [4, 4]),  # into itself
        ([3, 1, 2, 1, 2, 1, 2, 1, 2], [1, 2, 1]),
        ([1], []),
    ],
)
def test_ngram_longer_matches_propose_more(text: list[int], draft_tokens: list[int]) -> None:
    assert proposed(text) == draft_tokens
    assert proposed(text, gamma=1) == draft_tokens[:1]


@pytest.mark.parametrize("coupling", [Seeded, Rejection])
def test_ngram_proposal_law_is_point_mass(coupling: type) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]
    rows = ints([[*text, 0, 0], [*range(9), 9, 0, 0, 0]])  # ragged: nothing recurs in the second
    draft = NgramProposer(2).propose(SequenceState(rows, ints([11, 9])), Wanted(coupling), np.array([True, True]))
    assert draft.counts_B.tolist() == [2, 0]
    if coupling is Seeded:
        assert draft.probs_BKV.shape == (2, 2, 0)
    else:
        assert draft.probs_BKV[0].tolist() == np.eye(10)[[5, 6]].tolist()


def hybrid(rows: int, coupling: str = "seeded", prompt: list[int] | None = None) -> SequenceBatch:
    sequences = [TokenSequence(prompt or PROMPTS[b % len(PROMPTS)], PARAMS, seed=1234, choice=b) for b in range(rows)]
    batch = SequenceBatch(MODELS, MODES["draft-ngram"], SpeculativeConfig(sinks=4, window=24), coupling, sequences)
    deque(prefill_batch(batch), maxlen=0)
    return batch


@pytest.fixture
def short_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MIN_MATCH_ABOVE_DRAFT", 2)


@pytest.mark.usefixtures("short_matches")
@pytest.mark.parametrize("coupling", ["seeded", "rejection", "block"])
def test_ngram_and_draft_are_counted_apart(coupling: str) -> None:
    batch = hybrid(4, coupling)
    texts_BT = finished(batch)
    if coupling == "seeded":
        assert torch.equal(texts_BT, finished(started("ar", "seeded", PARAMS, 4)))
    draft, above, middle, _ = (tier.counters for tier in batch.tiers)
    names = ["draft", "ngram", "retrieval", "full"]
    assert [tier.name for tier in batch.tiers] == names
    for counters in (draft, above):
        assert 0 < counters.accepted_B.sum() < counters.proposed_B.sum()
    assert (draft.accepted_BN.sum(1) + above.accepted_BN.sum(1) == middle.passes_B).all()  # one tier per draft token
    assert {origin for sequence in batch.sequences for origin in sequence.origins} == set(names)


def written_on(batch: SequenceBatch, count: int) -> SequenceState:
    """Return the texts of a batch with `count` random tokens appended."""
    ids_BS = np.pad(batch.prefix.ids_BS, ((0, 0), (0, count)))
    for b, length in enumerate(batch.prefix.lengths_B.tolist()):
        ids_BS[b, length : length + count] = random.Random(b).choices(range(V), k=count)
    return SequenceState(ids_BS, batch.prefix.lengths_B + count)


def test_ngram_draft_skipped_for_long_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for max_lag in (tier_module.MAX_LAG, 10**9):
        monkeypatch.setattr(tier_module, "MAX_LAG", max_lag)
        monkeypatch.setattr(ngram, "MIN_MATCH_ABOVE_DRAFT", 50)  # nothing is found
        batch = hybrid(2)
        draft, proposer, *_ = batch.tiers
        assert isinstance(proposer, NgramProposer) and isinstance(draft, Tier)
        longer = written_on(batch, draft.cache.slack + 100)
        if max_lag == 10**9:  # negative control: the draft's cache cannot take the whole lag at once
            with pytest.raises(CacheError):
                proposer.propose(longer, batch.sampling, np.array([True, True]))
        else:
            proposal = proposer.propose(longer, batch.sampling, np.array([True, True]))
            assert (proposal.origins_BK == draft.level).all() and (proposal.counts_B == draft.gamma).all()
            assert (draft.cache.lengths_B >= longer.lengths_B - 1).all()


class Silent:
    """A draft below an n-gram proposer that proposes nothing and counts its calls."""

    def __init__(self) -> None:
        self.counters = NgramProposer(1).counters
        self.level = 0
        self.cache = type("Cache", (), {"lengths_B": ints([0])})()
        self.asked = 0

    def catch_up(self, prefix: SequenceState, live_B: Bools) -> Iterator[int]:
        return iter(())

    def propose(self, prefix: SequenceState, sampling: object, live_B: Bools) -> Draft:
        self.asked += 1
        return Draft.empty(1, 0)

    record_verdict = Tier.record_verdict


def test_ngram_retires_behind_better_draft_and_returns() -> None:
    draft = Silent()
    proposer = NgramProposer(1, 2, draft)  # type: ignore[arg-type]
    text = [*range(10), *range(8)]
    prefix = SequenceState(ints([*text, 0, 0])[None], ints([len(text)]))

    def drafts(accepted: int) -> bool:
        """Return whether the proposer drafts by n-grams itself; `accepted` of its two tokens are accepted."""
        draft.asked = 0
        proposer.propose(prefix, Wanted(), LIVE)
        origin_BK = np.full((1, 2), draft.level if draft.asked else proposer.level)
        proposer.record_verdict(Draft(origin_BK, np.empty((1, 2, 0)), origin_BK, ints([2])), ints([accepted]), LIVE)
        return not draft.asked

    assert [drafts(accepted=0) for _ in range(4)] == [True, True, True, False]  # eight tokens are not enough any more
    assert draft.counters.rejected_B[0] == 1  # the fourth was the draft's, and rejected
    assert [drafts(accepted=2) for _ in range(3)] == [True] * 3
    assert proposer.counters.rejected_B[0] == 3 and proposer.counters.accepted_B[0] == 6


def test_ngram_benchmark_script_runs(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark(["--context", "300", "--tokens", "8"])
    page = capsys.readouterr().out
    assert page.count("draft-ngram") == 3 and "| from 1 |" in page

"""What a retrieval view makes of a selection: when it selects anew, how much is in sight, what texts come of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.simple_cache import DEVICE
from tests.helpers.small_decoder import CLOSE, VOCAB, dense, feed, make_pool, prefill, slots_of, small_decoder, text
from triforce.engine.batch import Batch
from triforce.engine.config import SpeculativeConfig
from triforce.engine.modes import MODES
from triforce.engine.sequence import TokenSequence
from triforce.engine.tier_builder import ModelSet
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import PAGE, FullView, RetrievalConfig, RetrievalView
from triforce.kvcache.retrieval_config import Budget
from triforce.kvcache.selection import POLICIES, Policy, Recent
from triforce.ragged import ints

torch.set_num_threads(1)

ALL: dict[str, Callable[[], Policy]] = {**POLICIES, "recent": Recent}

DECODER = small_decoder()


class Spy:
    observes = True
    """Picks the first candidates, and remembers what it was asked."""

    def __init__(self, share: int = 8) -> None:
        self.share, self.asked = share, []

    def recent(self, budget: int) -> int:
        return budget // self.share

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        committed = int(full.lengths_B[row])
        assert candidates.stop * chunk <= committed, "only full committed chunks"
        assert 0 <= picks <= len(candidates)
        self.asked.append((committed, candidates, picks))
        first = torch.arange(candidates.start, candidates.start + picks, device=DEVICE)
        return first.expand(full.pool.config.layers, full.pool.config.kv_heads, -1)


class Rounds:
    """One row of a batch of two, and the passes that its tiers would make."""

    def __init__(self, length: int = 120, **setting: Any) -> None:
        self.full, self.spy, self.text = FullView(make_pool(DECODER, 2, 608)), Spy(), text(length)
        prefill(DECODER, self.full, 1, self.text)
        self.lower = RetrievalView(self.full, lambda: self.spy, RetrievalConfig(**({"budget": Budget(64)} | setting)))

    @property
    def selections(self) -> int:
        return len(self.spy.asked)

    def round(self, drafted: int = 3, kept: int | None = None, inner: int | None = None) -> None:
        """`drafted` tokens by the lower tier, the last one not fed; the exact tier keeps `kept` and adds one.

        `inner`: so many more guesses of a tier below are fed and refused by the lower tier itself.
        """
        kept = drafted if kept is None else kept
        seen = len(self.text)  # the next token of the text is drawn but not fed, as always
        if inner is not None:
            feed(DECODER, self.lower, [[], text(1 + inner)])
            self.lower.rewind(ints([0, seen + 1]))
            feed(DECODER, self.lower, [[], text(drafted - 1)] if drafted > 1 else [[], [1]])
            self.lower.rewind(ints([0, seen + drafted]))
        else:
            for t in range(drafted):
                feed(DECODER, self.lower, [[], [t]])
                self.lower.rewind(ints([0, seen + t + 1]))  # as Tier.settle does
        feed(DECODER, self.full, [[], text(drafted + 1)])
        self.text += text(kept + 1)
        lengths_B = ints([0, len(self.text)])
        self.full.rewind(lengths_B)
        self.lower.rewind(lengths_B)


@pytest.mark.parametrize(("refresh", "wanted"), [(0, 1), (1, 7), (2, 4), (3, 3)])
def test_refresh_counts_verifications(refresh: int, wanted: int) -> None:
    rounds = Rounds(refresh=refresh)
    for _ in range(7):
        rounds.round(kept=1)
    assert rounds.selections == wanted


def test_refresh_auto_waits_for_a_refusal() -> None:
    rounds, counts = Rounds(refresh=None), []
    for kept in (3, 3, 2, 3, 0, 0, 3, 3):
        rounds.round(drafted=3, kept=kept)
        counts.append(rounds.selections)
    assert counts == [1, 1, 1, 2, 2, 3, 4, 4]  # one selection at the start, and one after each refusal


def test_refusals_inside_the_lower_tier_are_none_of_the_verification() -> None:
    rounds = Rounds(refresh=None)
    for _ in range(4):
        rounds.round(drafted=3, inner=2)
    assert rounds.selections == 1


@pytest.mark.parametrize("budget", [32, 64, 112])
@pytest.mark.parametrize("chunk", [1, 8, 16, 32, 100])
def test_a_choice_keeps_to_its_budget(budget: int, chunk: int) -> None:
    """Sinks, picks and recent tokens together; more only where one chunk of each is more than that."""
    rounds = Rounds(budget=Budget(budget), chunk=chunk)
    for _ in range(20):
        rounds.round(kept=2)
        choice = rounds.lower.choices[1]
        if choice is not None and rounds.spy.asked:
            committed = rounds.spy.asked[-1][0]
            sight = choice.tokens + committed - choice.recent
            sinks = -(-PAGE // chunk) * chunk
            assert sight <= max(budget, sinks + budget // 8 + 2 * chunk)
            assert committed - choice.recent >= budget // 8
            tokens = [
                rounds.full.pool.slots(1, 0, 600).tolist().index(slot)
                for slot in slots_of(rounds.lower, 1)[0, 0].tolist()
            ]
            assert tokens == sorted(set(tokens)) and tokens[: min(PAGE, len(tokens))] == list(
                range(min(PAGE, len(tokens)))
            )
            assert max(tokens, default=-1) < choice.recent


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("chunk", [1, 8, 16, 32, 100])
@pytest.mark.parametrize("length", [33, 40, 65, 100, 128, 129, 200])
def test_any_chunk_at_any_length(name: str, chunk: int, length: int) -> None:
    """Contexts a little above the budget have few full chunks to choose from, or none."""
    full = FullView(make_pool(DECODER, 1, 224))
    prefill(DECODER, full, 0, text(length))
    lower = RetrievalView(full, ALL[name], RetrievalConfig(Budget(32), chunk))
    assert feed(DECODER, lower, [[1, 2, 3]])[0].isfinite().all()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("length", [161, 200, 700])
def test_the_first_selection_has_queries_to_go_by(name: str, length: int) -> None:
    """A prompt is prefilled in wide passes that report nothing; its last tokens are fed apart for this."""
    full = FullView(make_pool(DECODER, 1, 720))
    prefill(DECODER, full, 0, text(length))
    lower = RetrievalView(full, POLICIES[name], RetrievalConfig(Budget(64)))
    feed(DECODER, lower, [[1, 2, 3]])
    choice = lower.choices[0]
    assert choice is not None and choice.recent >= length - 32 and choice.tokens <= 64
    assert full.sights[0].start + full.sights[0].queries_LTHD.shape[1] == length


def test_full_layers_see_everything() -> None:
    """With all layers full the view is exact; with one of two, whichever, it differs from both."""
    results = []
    for layers in ((), (0,), (1,), (0, 1)):
        full = FullView(make_pool(DECODER, 1, 224))
        prefill(DECODER, full, 0, text(150))
        lower = RetrievalView(
            full, POLICIES["observed"], RetrievalConfig(Budget(32), searched_layers=frozenset(layers))
        )
        results.append(feed(DECODER, lower, [[1, 2, 3]])[0])
    exact = feed(DECODER, dense(DECODER, text(150)), [[1, 2, 3]])[0]
    torch.testing.assert_close(results.pop(), exact, **CLOSE)
    for one, other in combinations([*results, exact], 2):
        assert (one - other).abs().max() > 1e-2


def test_what_nobody_asked_the_exact_view_to_note_is_no_news() -> None:
    """Mode auto asks for attention only while it pays, and a row may come from a batch that did not."""
    full = FullView(make_pool(DECODER, 1, 224))
    prefill(DECODER, full, 0, text(150))
    lower = RetrievalView(full, POLICIES["observed"], RetrievalConfig(Budget(32)))
    full.grain = 0
    feed(DECODER, full, [[4]])
    everything = feed(DECODER, lower, [[1, 2, 3]])[0]
    torch.testing.assert_close(everything, feed(DECODER, dense(DECODER, [*text(150), 4]), [[1, 2, 3]])[0], **CLOSE)
    assert lower.choices == [None]


def test_a_share_of_the_context_grows_with_it() -> None:
    rounds = Rounds(budget=Budget(share=0.5))
    sights = []
    for _ in range(60):
        rounds.round(kept=3)
        choice = rounds.lower.choices[1]
        assert choice is not None
        sights.append(choice.tokens + rounds.spy.asked[-1][0] - choice.recent)
    assert sights[0] <= 64 and 160 <= sights[-1] <= 192


@pytest.mark.parametrize("width", [1, 33, 66])
def test_a_verification_of_any_width_is_news(width: int) -> None:
    """draft_tokens and speculative_tokens may be 32: so wide a pass must tell the lower view what it saw, too."""
    rounds = Rounds(length=100)
    rounds.round()
    before = rounds.full.sights[1].passes
    feed(DECODER, rounds.full, [[], text(width)])
    assert rounds.full.sights[1].passes == before + 1
    lower = RetrievalView(rounds.full, POLICIES["observed"], RetrievalConfig(Budget(64)))
    assert feed(DECODER, lower, [[], [1, 2]])[1].isfinite().all()


GAMMAS = ("draft_tokens", "speculative_tokens", "retrieval_policy")


def generate(mode: str, prompts: list[list[int]], tokens: int, **how: Any) -> tuple[list[list[int]], Batch]:
    params = SamplingParams(temperature=0.8, max_tokens=tokens)
    jobs = [TokenSequence(prompt, params, seed=5 + b) for b, prompt in enumerate(prompts)]
    gammas = {name: how.pop(name) for name in GAMMAS if name in how}
    retrieval = RetrievalConfig.parse(**(dict(budget=48, chunk=16, refresh=1, searched_layers="none") | how))
    models = ModelSet(DECODER, small_decoder(seed=3, layers=1))
    batch = Batch(models, MODES[mode], SpeculativeConfig(**gammas, retrieval=retrieval), "seeded", jobs)
    for _ in batch.prefill():
        pass
    while not batch.done:
        batch.step()
    return [job.tokens for job in jobs], batch


PROMPTS = [text(30, seed=20), text(77, seed=21), text(150, seed=22)]


@cache
def plain(tokens: int) -> list[list[int]]:
    return generate("ar", PROMPTS, tokens)[0]


@cache
def plain_alone(tokens: int) -> list[list[int]]:
    return generate("ar", PROMPTS[:1], tokens)[0]


@pytest.mark.parametrize(
    "how",
    [
        *(dict(chunk=chunk, retrieval_policy=name) for chunk in (8, 16, 32, 100) for name in POLICIES),
        *(dict(refresh=refresh) for refresh in (0, 1, 3, "auto")),
        dict(searched_layers="1"), dict(searched_layers="0-1"), dict(budget="20%"),
        dict(budget="1%", retrieval_policy="quest"),
        dict(mode="streaming"), dict(mode="streaming", chunk=8), dict(mode="ngram"), dict(mode="triforce"),
        dict(mode="triforce", draft_tokens=1, speculative_tokens=1, refresh="auto"),
        dict(speculative_tokens=24), dict(speculative_tokens=24, refresh=0),
        dict(mode="ngram", draft_tokens=20, speculative_tokens=20, retrieval_policy="mean_key"),
    ],
    ids=lambda how: "-".join(f"{value}" for value in how.values()),
)  # fmt: skip
def test_texts_are_those_of_plain_decoding(how: dict[str, Any]) -> None:
    how = dict(how)
    assert generate(how.pop("mode", "retrieval"), PROMPTS, 32, **how)[0] == plain(32)


@pytest.mark.parametrize("policy", POLICIES)
def test_generation_far_beyond_the_budget(policy: str) -> None:
    """Six times the budget from a short prompt, and the sight stays as small as asked."""
    texts, batch = generate("retrieval", PROMPTS[:1], 200, budget=32, retrieval_policy=policy)
    assert texts == plain_alone(200)
    choice = batch.top.below.cache.choices[0]
    assert choice.tokens <= 32 and choice.recent > 180
    assert all(0 <= token < VOCAB for token in texts[0])

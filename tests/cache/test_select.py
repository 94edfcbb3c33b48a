"""One contract for every selection policy, and what a retrieval view makes of it.

The slow path takes queries, keys and attention from the dense cache (small.py) and scores one chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simple_cache import DEVICE
from small import CLOSE, VOCAB, Dense, dense, feed, make_pool, prefill, slots_of, small_decoder, text
from torch import Tensor

from triforce.batch import Batch
from triforce.cache import PAGE, Full, Retrieval, Setting
from triforce.cache.budget import Budget
from triforce.cache.select import POLICIES, Policy, Recent
from triforce.decoder import Decoder
from triforce.errors import RequestError
from triforce.job import Job
from triforce.ladder import MODES, Models, Speculation
from triforce.request import SamplingParams
from triforce.shapes import ints

torch.set_num_threads(1)
ALL: dict[str, Callable[[], Policy]] = {**POLICIES, "recent": Recent}
DECODER = small_decoder()
SINGLE = small_decoder(seed=1, kv_heads=4)  # every KV head has one query head
LENGTH, KEPT = 163, 3  # of a prompt, and of the five guesses verified behind it


@cache
def scene(decoder: Decoder) -> tuple[Full, Dense, Dense]:
    """Row 1 of two after a prefill and a verification; its fresh prefill, and one with the refused tokens too."""
    full, ids, guess = Full(make_pool(decoder, 2, 224, fragmented=True)), text(LENGTH), text(5, seed=1)
    prefill(decoder, full, 0, text(90, seed=2))
    prefill(decoder, full, 1, ids)
    feed(decoder, full, [[], guess])
    full.rewind(ints([90, LENGTH + KEPT]))
    verified = dense(decoder, ids)
    feed(decoder, verified, [guess])
    return full, dense(decoder, ids + guess[:KEPT]), verified


def chunk_of(memory_NGD: Tensor, c: int, chunk: int, g: int) -> Tensor:
    return memory_NGD[c * chunk : (c + 1) * chunk, g]


def slow_scores(name: str, decoder: Decoder, layer: int, chunk: int, chunks: int) -> Tensor:
    """(G, N) from scratch."""
    _, truth, verified = scene(decoder)
    group = decoder.config.heads // decoder.config.kv_heads
    queries_HD = verified.queries[layer][KEPT - 1]  # of the last committed token
    scores = torch.zeros(decoder.config.kv_heads, chunks, dtype=torch.float64, device=DEVICE)
    for g in range(decoder.config.kv_heads):
        queries = [queries_HD[g * group + i] for i in range(group)]
        for c in range(chunks):
            keys_CD = chunk_of(truth.keys[layer], c, chunk, g)
            if name == "observed":
                scores[g, c] = verified.mass[layer][g, c * chunk : (c + 1) * chunk].sum()
            elif name == "mean_key":
                scores[g, c] = sum(q @ keys_CD.sum(0) / chunk for q in queries)
            else:
                corners = [torch.maximum(q * keys_CD.min(0).values, q * keys_CD.max(0).values) for q in queries]
                scores[g, c] = sum(corner.sum() for corner in corners)
    return scores


CUTS = [(8, range(2, 18), 5), (16, range(1, 9), 3), (16, range(1, 9), 8), (32, range(1, 5), 2), (100, range(0, 1), 1)]
CUTS += [(5, range(4, 30), 11), (16, range(1, 1), 0), (16, range(3, 9), 0)]


@pytest.mark.parametrize(("chunk", "candidates", "picks"), CUTS)
@pytest.mark.parametrize("decoder", [DECODER, SINGLE], ids=["grouped", "single"])
@pytest.mark.parametrize("name", ALL)
def test_contract(name: str, decoder: Decoder, chunk: int, candidates: range, picks: int) -> None:
    full = scene(decoder)[0]
    policy, G = ALL[name](), decoder.config.kv_heads
    ids_LGN = policy.pick(full, 1, chunk, candidates, picks)
    assert len(ids_LGN) == decoder.config.layers
    for layer, ids_GN in enumerate(ids_LGN):
        assert ids_GN.dtype == torch.long and ids_GN.device.type == DEVICE
        assert ids_GN.shape == (G, 0 if name == "recent" else picks)
        assert (ids_GN.diff(dim=1) > 0).all(), "ascending, each once"
        assert all(n in candidates for n in ids_GN.flatten().tolist())
        if name != "recent" and picks:
            scores_GN = slow_scores(name, decoder, layer, chunk, candidates.stop)
            scores_GN[:, : candidates.start] = -torch.inf
            wanted = scores_GN.topk(picks, dim=1).indices.sort(dim=1).values
            assert torch.equal(ids_GN, wanted)


@pytest.mark.parametrize("name", POLICIES)
def test_heads_and_layers_choose_for_themselves(name: str) -> None:
    """Else a policy that asked one head for all would pass."""
    full, policy = scene(DECODER)[0], POLICIES[name]()
    picks = policy.pick(full, 1, 8, range(2, 18), 5)
    assert not torch.equal(picks[0], picks[1])
    assert any(not torch.equal(head, ids_GN[0]) for ids_GN in picks for head in ids_GN)


@pytest.mark.parametrize("name", POLICIES)
def test_asking_again_for_more_of_a_growing_text(name: str) -> None:
    """Summaries are extended, not made anew: the result is that of a fresh policy."""
    full, grown, neighbour = scene(DECODER)[0], POLICIES[name](), POLICIES[name]()
    for stop in (1, 3, 3, 9, 7, 9):
        ids_LGN = grown.pick(full, 1, 16, range(0, stop), min(stop, 2))
        assert torch.equal(ids_LGN, POLICIES[name]().pick(full, 1, 16, range(0, stop), min(stop, 2)))
        other = (full, 0, 16, range(0, min(stop, 5)), 1)  # a neighbour has its own policy
        assert torch.equal(neighbour.pick(*other), POLICIES[name]().pick(*other))
    one, other = (policy.pick(full, row, 16, range(5), 2) for policy, row in ((grown, 1), (neighbour, 0)))
    assert not any(torch.equal(*each) for each in zip(one, other, strict=True))


def test_quest_bounds_every_product_of_the_chunk() -> None:
    """With one query head per KV head the score is at least q . k of each token, and equals it for chunks of one."""
    from triforce.cache.select.quest import Quest
    from triforce.cache.select.summary import last_query

    full, truth, _ = scene(SINGLE)
    for layer in range(2):
        q_GD = last_query(full, 1)[layer, :, 0].double()
        for chunk in (1, 7, 16):
            chunks = (LENGTH + KEPT) // chunk
            least_GND, most_GND = Quest().bounds.of(full, 1, chunk, chunks)[layer].double().unbind(2)
            bound_GN = torch.maximum(q_GD[:, None] * least_GND, q_GD[:, None] * most_GND).sum(2)
            exact_GNC = torch.einsum(
                "gd,ncgd->gnc", q_GD, truth.keys[layer][: chunks * chunk].unflatten(0, (chunks, chunk))
            )
            assert (bound_GN[..., None] >= exact_GNC - 1e-4).all()
            if chunk == 1:
                torch.testing.assert_close(bound_GN, exact_GNC[..., 0], **CLOSE)
            torch.testing.assert_close(bound_GN, slow_scores("quest", SINGLE, layer, chunk, chunks), **CLOSE)


def test_observed_mass_is_that_of_the_verification_alone() -> None:
    """All five queries of it, the refused ones too; total T * H / G, whatever came before."""
    full, _, verified = scene(DECODER)
    for layer in range(2):
        mass_GS = full.sights[1].mass_LGU[layer, :, : verified.mass[layer].shape[1]]
        torch.testing.assert_close(mass_GS.double(), verified.mass[layer], **CLOSE)
        torch.testing.assert_close(mass_GS.sum(1), torch.full_like(mass_GS[:, 0], 5 * 2.0))


# Budgets


@pytest.mark.parametrize(
    ("written", "context", "tokens"),
    [
        (2048, 10**6, 2048), ("2048", 5, 2048), ("2047", 0, 2048), (2049, 0, 2064), (33, 0, 48), (32, 0, 32),
        ("3%", 100_000, 3008), ("3%", 10, 32), ("100%", 1000, 1008), ("0.5%", 100_000, 512), ("50%", 64, 32),
    ],
)  # fmt: skip
def test_budgets(written: str | int, context: int, tokens: int) -> None:
    assert Budget.parse(written).of(context) == tokens


@pytest.mark.parametrize(
    "written",
    ["", "many", "0", 0, "-5", -2048, "31", "0%", "-3%", "101%", "%", "nan%", "inf%", "3 percent", "2e3", "12.5"],
)
def test_bad_budgets(written: str | int) -> None:
    with pytest.raises(RequestError, match="budget"):
        Budget.parse(written)


@given(share=st.floats(0.01, 100), context=st.integers(0, 10**6))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_shares_grow_with_the_context(share: float, context: int) -> None:
    budget = Budget.parse(f"{share!r}%")
    tokens = budget.of(context)
    assert tokens % PAGE == 0 and max(32, share / 100 * context - 1e-6) <= tokens < max(33, share / 100 * context + 17)
    assert budget.of(context + 1000) >= tokens


@pytest.mark.parametrize(
    "changes",
    [
        dict(chunk=0),
        dict(chunk=-1),
        dict(full_layers="-1"),
        dict(full_layers="some"),
        dict(full_layers="0,"),
        dict(refresh="often"),
        dict(refresh=-1),
        dict(refresh="1.5"),
        dict(budget="x"),
    ],
)
def test_bad_settings(changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        Setting.parse(**(dict(budget=64, chunk=16, refresh=1, full_layers="none") | changes))


def test_settings_as_users_write_them() -> None:
    assert Setting.parse("3%", 8, "auto", "0,3-5") == Setting(Budget(share=0.03), 8, None, frozenset({0, 3, 4, 5}))
    assert Setting.parse(64, 16, "0", "auto") == Setting(Budget(64), 16, 0, None)


# What a view makes of it


class Spy:
    observes = True
    """Picks the first candidates, and remembers what it was asked."""

    def __init__(self, share: int = 8) -> None:
        self.share, self.asked = share, []

    def recent(self, budget: int) -> int:
        return budget // self.share

    def pick(self, full: Full, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        committed = int(full.lengths_B[row])
        assert candidates.stop * chunk <= committed, "only full committed chunks"
        assert 0 <= picks <= len(candidates)
        self.asked.append((committed, candidates, picks))
        first = torch.arange(candidates.start, candidates.start + picks, device=DEVICE)
        return first.expand(full.pool.config.layers, full.pool.config.kv_heads, -1)


class Rounds:
    """One row of a batch of two, and the passes that its tiers would make."""

    def __init__(self, length: int = 120, **setting: Any) -> None:
        self.full, self.spy, self.text = Full(make_pool(DECODER, 2, 608)), Spy(), text(length)
        prefill(DECODER, self.full, 1, self.text)
        self.lower = Retrieval(self.full, lambda: self.spy, Setting(**({"budget": Budget(64)} | setting)))

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
    full = Full(make_pool(DECODER, 1, 224))
    prefill(DECODER, full, 0, text(length))
    lower = Retrieval(full, ALL[name], Setting(Budget(32), chunk))
    assert feed(DECODER, lower, [[1, 2, 3]])[0].isfinite().all()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("length", [161, 200, 700])
def test_the_first_selection_has_queries_to_go_by(name: str, length: int) -> None:
    """A prompt is prefilled in wide passes that report nothing; its last tokens are fed apart for this."""
    full = Full(make_pool(DECODER, 1, 720))
    prefill(DECODER, full, 0, text(length))
    lower = Retrieval(full, POLICIES[name], Setting(Budget(64)))
    feed(DECODER, lower, [[1, 2, 3]])
    choice = lower.choices[0]
    assert choice is not None and choice.recent >= length - 32 and choice.tokens <= 64
    assert full.sights[0].start + full.sights[0].queries_LTHD.shape[1] == length


def test_full_layers_see_everything() -> None:
    """With all layers full the view is exact; with one of two, whichever, it differs from both."""
    results = []
    for layers in ((), (0,), (1,), (0, 1)):
        full = Full(make_pool(DECODER, 1, 224))
        prefill(DECODER, full, 0, text(150))
        lower = Retrieval(full, POLICIES["observed"], Setting(Budget(32), full_layers=frozenset(layers)))
        results.append(feed(DECODER, lower, [[1, 2, 3]])[0])
    exact = feed(DECODER, dense(DECODER, text(150)), [[1, 2, 3]])[0]
    torch.testing.assert_close(results.pop(), exact, **CLOSE)
    for one, other in combinations([*results, exact], 2):
        assert (one - other).abs().max() > 1e-2


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
    """gamma_1 and gamma_2 may be 32: so wide a pass must tell the lower view what it saw, too."""
    rounds = Rounds(length=100)
    rounds.round()
    before = rounds.full.sights[1].passes
    feed(DECODER, rounds.full, [[], text(width)])
    assert rounds.full.sights[1].passes == before + 1
    lower = Retrieval(rounds.full, POLICIES["observed"], Setting(Budget(64)))
    assert feed(DECODER, lower, [[], [1, 2]])[1].isfinite().all()


# End to end: whatever is selected, the text of a seed is that of plain decoding


def generate(mode: str, prompts: list[list[int]], tokens: int, **how: Any) -> tuple[list[list[int]], Batch]:
    params = SamplingParams(temperature=0.8, max_tokens=tokens)
    jobs = [Job(prompt, params, seed=5 + b) for b, prompt in enumerate(prompts)]
    gammas = {name: how.pop(name) for name in ("gamma_1", "gamma_2", "selection") if name in how}
    retrieval = Setting.parse(**(dict(budget=48, chunk=16, refresh=1, full_layers="none") | how))
    models = Models(DECODER, small_decoder(seed=3, layers=1))
    batch = Batch(models, MODES[mode], Speculation(**gammas, retrieval=retrieval), "seeded", jobs)
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
        *(dict(chunk=chunk, selection=name) for chunk in (8, 16, 32, 100) for name in POLICIES),
        *(dict(refresh=refresh) for refresh in (0, 1, 3, "auto")),
        dict(full_layers="1"), dict(full_layers="0-1"), dict(budget="20%"), dict(budget="1%", selection="quest"),
        dict(mode="streaming"), dict(mode="streaming", chunk=8), dict(mode="lookup"), dict(mode="triforce"),
        dict(mode="triforce", gamma_1=1, gamma_2=1, refresh="auto"), dict(gamma_2=32), dict(gamma_2=32, refresh=0),
        dict(mode="lookup", gamma_1=20, gamma_2=20, selection="mean_key"),
    ],
    ids=lambda how: "-".join(f"{value}" for value in how.values()),
)  # fmt: skip
def test_texts_are_those_of_plain_decoding(how: dict[str, Any]) -> None:
    how = dict(how)
    assert generate(how.pop("mode", "retrieval"), PROMPTS, 48, **how)[0] == plain(48)


@pytest.mark.parametrize("selection", POLICIES)
def test_generation_far_beyond_the_budget(selection: str) -> None:
    """Six times the budget from a short prompt, and the sight stays as small as asked."""
    texts, batch = generate("retrieval", PROMPTS[:1], 200, budget=32, selection=selection)
    assert texts == plain_alone(200)
    choice = batch.top.below.cache.choices[0]
    assert choice.tokens <= 32 and choice.recent > 180
    assert all(0 <= token < VOCAB for token in texts[0])

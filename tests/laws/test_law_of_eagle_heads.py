"""A proposal over an EAGLE head has the target's law: integrated over all noise, of real tiers, entries and passes.

Earlier proposals reject tokens, so the draft reads the KV that they left. Thresholds come from the laws that the tiers
themselves report; the law they are compared with is that of a dense pass with other attention code.

Shape suffixes: N cells, J columns of a verification, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.laws.eagle import EAGLE_MODELS, TOKENS
from tests.helpers.laws.enumeration import distance
from tests.helpers.laws.one_verification import Cut, Interval, Text, as_a_block, cells, continued, draws, one_by_one
from tests.helpers.laws.tiny import PROMPTS, SETTING, V, laws
from triforce.backends.token_sampler import sampling
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.sequence_group import prefill_batch
from triforce.engine.tier_builder import MODES
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import Ints
from triforce.speculation import Draft, Tier

torch.set_num_threads(1)
GAMMA = SETTING.draft_tokens
BEFORE = (0.02, 0.98, 0.6, 0.97)
"""Uniforms of all decisions of the earlier proposals."""
ROUNDED = 1e-5
"""Bound on differences of laws: float32 logits of passes of different widths."""
EDGE = 1e-4
"""Distance from both ends of its interval at which a draft token is drawn, too."""
WARPED = SamplingParams(0.8, top_p=0.97, presence_penalty=0.3, max_tokens=40)
Given = tuple[list[float], list[float]]
"""Uniforms by which a row's draft tokens are drawn, and uniforms of the verification: first the one of the draw."""


class GivenNoise:
    """Noise that returns given uniforms row by row."""

    def __init__(self, rows: Sequence[Given]) -> None:
        self.rows = rows
        self.drawn = 0

    def uniforms(self, tier: int, n: int, used_B: Ints) -> Tensor:
        if tier == 0:
            self.drawn += 1
            return torch.tensor([[draft_tokens[self.drawn - 1]] for draft_tokens, _ in self.rows], dtype=torch.float64)
        return torch.tensor([verified[:n] for _, verified in self.rows], dtype=torch.float64)


@dataclass
class ProposalOutcome:
    """Outcome of a proposal: draft tokens and their laws, the target's laws after them, new tokens of each row.

    prompt_tokens: tokens of the text before the proposal, equal in all rows.
    """

    draft_tokens: list[Text]
    draft_tokens_NKV: Tensor
    targets_NJV: Tensor
    new: list[Text]
    prompt_tokens: list[int]


def proposal(rows: Sequence[Given], coupling: str) -> ProposalOutcome:
    """Return the outcome of the real tiers with these uniforms after the proposals of `BEFORE`."""
    sequences = [TokenSequence(PROMPTS[0], WARPED, seed=1) for _ in rows]
    batch = SequenceBatch(EAGLE_MODELS, MODES["draft"], SETTING, coupling, sequences)
    deque(prefill_batch(batch), maxlen=0)
    for u in BEFORE:
        step(batch, [([u] * GAMMA, [u] * (GAMMA + 1))] * len(rows))
    prompt_tokens = [*sequences[0].tokens]
    assert len(prompt_tokens) < len(BEFORE) * (GAMMA + 1), "some draft token was rejected"
    drafted, verified = (recorded_drafts(tier) for tier in batch.tiers)
    step(batch, rows)
    draft_tokens = [tuple(tokens) for tokens in drafted[0].tokens_BK[:, :GAMMA].tolist()]
    new = [tuple(sequence.tokens[len(prompt_tokens) :]) for sequence in sequences]
    return ProposalOutcome(draft_tokens, drafted[0].probs_BKV, verified[0].probs_BKV, new, prompt_tokens)


def recorded_drafts(tier: Any) -> list[Any]:
    """Return a list that collects the drafts that a tier returns from now on."""
    drafts = list[Any]()
    propose = tier.propose
    tier.propose = lambda *how: drafts.append(propose(*how)) or drafts[-1]
    return drafts


def step(batch: SequenceBatch, rows: Sequence[Given]) -> None:
    lengths = [len(PROMPTS[0])] * len(rows)
    bound = batch.coupling(GivenNoise(rows))
    batch.sampling = sampling([WARPED] * len(rows), lengths, V, bound)
    batch.step()


def inside(edges: Sequence[Interval], part: float = 0.5) -> list[float]:
    """Return a uniform in each interval."""
    return [low + part * (high - low) for low, high in edges]


def drafting(coupling: str) -> tuple[dict[Text, list[float]], dict[Text, list[float]], dict[Text, list[Interval]]]:
    """Return the laws of draft and target after all possible draft tokens, and the intervals that draw each."""
    draft_token_laws = dict[Text, list[float]]()
    target_laws_by_text = dict[Text, list[float]]()
    drawn: dict[Text, list[Interval]] = {(): []}
    for j in range(GAMMA + 1):
        rows = [([*inside(edges), *[0.5] * GAMMA], [0.0] * (GAMMA + 1)) for edges in drawn.values()]
        outcome = proposal(rows, coupling)
        target_laws_by_text |= dict(zip(drawn, outcome.targets_NJV[:, j].tolist(), strict=True))
        if j < GAMMA:
            laws_at_position = dict(zip(drawn, outcome.draft_tokens_NKV[:, j].tolist(), strict=True))
            draft_token_laws |= laws_at_position
            drawn = {
                (*text, v): [*drawn[text], edge]
                for text, law in laws_at_position.items() for v, edge in enumerate(draws(law)) if law[v]
            }  # fmt: skip
    return draft_token_laws, target_laws_by_text, drawn


def deviation(coupling: str, cut: Cut) -> tuple[float, list[bool]]:
    """Return the largest difference of a probability between a proposal, continued by the target's law, and that law.

    Also return whether draft tokens are drawn as their laws say, at the lower and at the upper end of their intervals.
    """
    q, p, drawn = drafting(coupling)
    assert {v for law in q.values() for v, weight in enumerate(law) if weight} <= {*TOKENS.tolist()}
    draft_tokens_as_predicted = []
    for part in (EDGE, 1 - EDGE):
        outcome = proposal([(inside(edges, part), [0.0] * (GAMMA + 1)) for edges in drawn.values()], coupling)
        draft_tokens_as_predicted.append(outcome.draft_tokens == list(drawn))
    listed = list(cells(p.__getitem__, lambda text: q.get(text, [0.0] * V), GAMMA, cut))
    outcome = proposal([(inside(drawn[cell.draft_tokens]), inside(cell.edges)) for cell in listed], coupling)
    assert {len(text) - 1 for text in outcome.new} == {*range(GAMMA + 1)}, (
        "all numbers of draft tokens are accepted somewhere"
    )
    dense = target_laws(outcome.prompt_tokens, GAMMA + 1)
    text_law = dict[Text, float]()
    for text, cell in zip(outcome.new, listed, strict=True):
        for full_text, weight in continued(dense.__getitem__, text, cell.weight, GAMMA + 1).items():
            text_law[full_text] = text_law.get(full_text, 0.0) + weight
    return distance(text_law, continued(dense.__getitem__, (), 1.0, GAMMA + 1)), draft_tokens_as_predicted


def target_laws(prompt_tokens: list[int], length_limit: int) -> dict[Text, list[float]]:
    """Return the target's law after all texts of fewer than `length_limit` tokens, by a dense pass."""
    texts = [text for length in range(length_limit) for text in product(range(V), repeat=length)]
    ids_BT = torch.tensor([[*prompt_tokens, *text, *[0] * (length_limit - len(text))] for text in texts])
    laws_BTV = laws(ids_BT.repeat_interleave(len(PROMPTS), 0), WARPED, EAGLE_MODELS.target)[:: len(PROMPTS)]
    return {text: laws_BTV[n, len(prompt_tokens) + len(text)].tolist() for n, text in enumerate(texts)}


each_coupling = pytest.mark.parametrize(("coupling", "cut"), [("rejection", one_by_one), ("block", as_a_block)])


@each_coupling
def test_proposal_over_eagle_head_has_target_law(coupling: str, cut: Cut) -> None:
    variation, draft_tokens_as_predicted = deviation(coupling, cut)
    assert variation < ROUNDED and draft_tokens_as_predicted == [True, True]


@each_coupling
def test_eagle_head_that_tells_another_law_is_detected(
    coupling: str, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's draft tokens are verified as if they came from a slightly flatter law."""
    propose = Tier.propose

    def flatter(self: Any, *how: Any) -> Draft:
        draft: Draft = propose(self, *how)
        if self.name == "draft":
            draft.probs_BKV[:] = 0.9 * draft.probs_BKV + 0.1 * (draft.probs_BKV > 0) / len(TOKENS)
        return draft

    monkeypatch.setattr(Tier, "propose", flatter)
    assert not all(deviation(coupling, cut)[1])


@each_coupling
def test_verifier_that_accepts_too_much_is_detected(coupling: str, cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier treats draft tokens as if their law gave them half of their probability."""
    monkeypatch.setattr(GivenNoise, "uniforms", halving_thresholds(GivenNoise.uniforms))
    assert deviation(coupling, cut)[0] > 100 * ROUNDED


def halving_thresholds(uniforms: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that halves the uniforms of verified draft tokens."""

    def halved_uniforms(self: GivenNoise, tier: int, n: int, used_B: Ints) -> Tensor:
        found_BJ = uniforms(self, tier, n, used_B)
        return found_BJ if tier == 0 else torch.cat([found_BJ[:, :1], 0.5 * found_BJ[:, 1:]], 1)

    return halved_uniforms

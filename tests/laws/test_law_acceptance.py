"""A tier's draft tokens are accepted as often as its law and the verifier's imply: sum of min(p, q), or race overlap.

Shape suffixes: B rows, J columns, V vocabulary.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.laws.enumeration import TierStack
from tests.helpers.laws.markov import PLAIN
from tests.helpers.laws.tiny import finished, started
from tests.helpers.samplers import Sampler, each_sampler, noise_for, torch_sampling
from tests.helpers.slow_parameters import slow
from triforce.arrays import Array
from triforce.backends.torch.tensors import as_tensor
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import Bools
from triforce.speculation import Draft, Rejection, Seeded, SequenceState, TokenSampler

torch.set_num_threads(1)
V, ROWS, PROPOSALS, LIMIT = 5, 2000, 12, 4.5  # LIMIT: standard deviations


def overlap_of_laws(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """Return P(accepted) under `rejection`: sum of min(p, q)."""
    return torch.minimum(p_BV, q_BV).sum(1)


def overlap_of_races(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """P(argmin E / p = argmin E / q) = sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i): token i wins both at
    time t if each j comes after t times that maximum, and an integral over t is left."""
    ratios_BVV = torch.maximum(p_BV[:, None] / p_BV[..., None], q_BV[:, None] / q_BV[..., None])
    return (1 / ratios_BVV.sum(2)).sum(1)


class Watched:
    """A sampling that records, for each verification, whether the first draft token was accepted, and its chance."""

    def __init__(self, sampling: TokenSampler, tables: list[Tensor] | None = None) -> None:
        self.sampling = sampling
        self.tables = tables
        self.coupling = sampling.coupling
        self.vocab_size = sampling.vocab_size
        self.probs_size = sampling.probs_size
        self.kept: dict[int, list[Tensor]] = {}
        self.likely: dict[int, list[Tensor]] = {}

    def verify(self, draft: Draft, logits_BJV: Array, prefix: SequenceState, live_B: Bools, tier: int) -> Draft:
        step = self.sampling.verify(draft, logits_BJV, prefix, live_B, tier)
        if draft.tokens_BK.shape[1]:
            judged_B = live_B & (draft.counts_B > 0)
            if self.tables:  # the laws are known without the loop
                rows = np.arange(len(live_B))
                a_B, b_B = (prefix.ids_BS[rows, prefix.lengths_B - back] for back in (2, 1))
                p_BV, q_BV = (self.tables[level][a_B, b_B] for level in (tier, tier - 1))
            else:
                p_BV = as_tensor(step.probs_BKV)[:, 0]
                q_BV = as_tensor(draft.probs_BKV)[:, 0]
            overlap = overlap_of_races if isinstance(self.coupling, Seeded) else overlap_of_laws
            self.kept.setdefault(tier, []).append(torch.from_numpy((step.counts_B > 1)[judged_B]).double())
            self.likely.setdefault(tier, []).append(overlap(p_BV, q_BV)[torch.from_numpy(judged_B)])
        return step

    def excess(self, tier: int) -> float:
        """Return the excess of accepted first draft tokens over the expected number, in standard deviations."""
        accepted = torch.cat(self.kept[tier])
        likely = torch.cat(self.likely[tier])
        assert len(accepted) > 500 and 0.1 < likely.mean() < 0.95
        return float((accepted - likely).sum() / (likely * (1 - likely)).sum().sqrt())


def watched_stack(coupling: type, gammas: list[int], sampler: Sampler = torch_sampling) -> Watched:
    """Run PROPOSALS of a stack of random chains with the engine's own noise."""
    generator = torch.Generator().manual_seed(4)
    common = torch.randn(V, V, V, generator=generator, dtype=torch.float64)
    tables = [common + 0.7 * torch.randn(V, V, V, generator=generator, dtype=torch.float64) for _ in gammas]
    noise = noise_for(sampler, [9] * ROWS, range(ROWS))
    inner = sampler([PLAIN] * ROWS, [0] * ROWS, V, coupling(noise))
    watched = Watched(inner, [table.softmax(-1) for table in tables])
    stack = TierStack(list(zip(tables, gammas, strict=True)), sampler=lambda *_: watched)
    branches = stack.start(PROPOSALS * (sum(gammas) + 1), ROWS)
    for _ in range(PROPOSALS):
        branches = stack.play(branches, noise)
    return watched


@each_sampler
@pytest.mark.parametrize("gammas", [[1, 1], [2, 1], [1, 2, 1], [1, 1, 1, 1]], ids=str)
def test_rejection_accepts_overlap_of_laws(gammas: list[int], sampler: Sampler) -> None:
    watched = watched_stack(Rejection, gammas, sampler)
    assert all(abs(watched.excess(tier)) < LIMIT for tier in range(1, len(gammas)))


@each_sampler
@pytest.mark.parametrize("gammas", [[1, 1], [3, 1], [1, 2, 1]], ids=str)
def test_seeded_accepts_common_race_winners(gammas: list[int], sampler: Sampler) -> None:
    """This holds for the top tier only: a lower tier may return to a position and find the same noise there."""
    assert abs(watched_stack(Seeded, gammas, sampler).excess(len(gammas) - 1)) < LIMIT


@pytest.mark.parametrize("mode", ["triforce", *slow("draft", "ngram")])
def test_engine_acceptance_equals_overlap(mode: str) -> None:
    batch = started(mode, "rejection", SamplingParams(max_tokens=40), 60)
    watched = batch.sampling = Watched(batch.sampling)
    finished(batch)
    for tier in range(1, len(batch.tiers)):
        assert abs(watched.excess(tier)) < LIMIT
        below = batch.tiers[tier - 1].counters
        assert below.accepted_BN[:, 1:].sum() == torch.cat(watched.kept[tier]).sum()  # the reported statistics

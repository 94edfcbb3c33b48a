"""A tier's guesses are kept as often as its law and the verifier's say: sum of min(p, q), or the overlap of races.

Shape suffixes: B rows, J columns, V vocabulary.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.laws.tiny import finished, started
from tests.laws.toy import Ladder
from triforce.request import SamplingParams
from triforce.sampling import Noise
from triforce.speculation import Coupling, Draft, Rejection, Seeded

torch.set_num_threads(1)
V, ROWS, PROPOSALS, LIMIT = 5, 2000, 12, 4.5  # LIMIT: standard deviations


def overlap_of_laws(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """P(kept) under `rejection`: sum of min(p, q)."""
    return torch.minimum(p_BV, q_BV).sum(1)


def overlap_of_races(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """P(argmin E / p = argmin E / q) = sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i): token i wins both at
    time t if each j comes after t times that maximum, and an integral over t is left."""
    ratios_BVV = torch.maximum(p_BV[:, None] / p_BV[..., None], q_BV[:, None] / q_BV[..., None])
    return (1 / ratios_BVV.sum(2)).sum(1)


class Watched:
    """A coupling that notes, where a tier verifies guesses, whether it kept the first, and how likely that was."""

    def __init__(self, coupling: Coupling, tables: list[Tensor] | None, ids_BS: Tensor) -> None:
        self.coupling, self.tables, self.ids_BS = coupling, tables, ids_BS
        self.kept: dict[int, list[Tensor]] = {}
        self.likely: dict[int, list[Tensor]] = {}
        self.law_size = coupling.law_size

    def verify(self, draft: Draft, probs_BJV: Tensor, lengths_B: Tensor, live_B: Tensor, tier: int) -> Draft:
        step = self.coupling.verify(draft, probs_BJV, lengths_B, live_B, tier)
        if draft.tokens_BK.shape[1]:
            judged_B = live_B & (draft.counts_B > 0)
            p_BV, q_BV = probs_BJV[:, 0], draft.laws_BKV[:, 0]
            if self.tables:  # the laws are known without asking the loop
                a_B, b_B = (self.ids_BS.gather(1, lengths_B[:, None] - back)[:, 0] for back in (2, 1))
                p_BV, q_BV = (self.tables[level][a_B, b_B] for level in (tier, tier - 1))
            overlap = overlap_of_races if isinstance(self.coupling, Seeded) else overlap_of_laws
            self.kept.setdefault(tier, []).append((step.counts_B > 1)[judged_B].double())
            self.likely.setdefault(tier, []).append(overlap(p_BV, q_BV)[judged_B])
        return step

    def excess(self, tier: int) -> float:
        """How many standard deviations more first guesses were kept than expected: a sum of independent surprises."""
        kept, likely = torch.cat(self.kept[tier]), torch.cat(self.likely[tier])
        assert len(kept) > 500 and 0.1 < likely.mean() < 0.95
        return float((kept - likely).sum() / (likely * (1 - likely)).sum().sqrt())


def watched_ladder(coupling: type, gammas: list[int]) -> Watched:
    """PROPOSALS of a ladder of random chains, with the engine's own noise."""
    generator = torch.Generator().manual_seed(4)
    common = torch.randn(V, V, V, generator=generator, dtype=torch.float64)
    tables = [common + 0.7 * torch.randn(V, V, V, generator=generator, dtype=torch.float64) for _ in gammas]
    watched: list[Watched] = []

    def watch(noise: Noise) -> Watched:
        watched[:] = watched or [Watched(coupling(noise), [table.softmax(-1) for table in tables], worlds.ids_BS)]
        watched[0].ids_BS = worlds.ids_BS
        return watched[0]

    ladder = Ladder(list(zip(tables, gammas, strict=True)), coupling=watch)
    worlds, noise = ladder.start(PROPOSALS * (sum(gammas) + 1), ROWS), Noise([9] * ROWS, range(ROWS))
    for _ in range(PROPOSALS):
        worlds = ladder.play(worlds, noise)
    return watched[0]


@pytest.mark.parametrize("gammas", [[1, 1], [2, 1], [1, 2, 1], [1, 1, 1, 1]], ids=str)
def test_rejection_keeps_what_the_laws_share(gammas: list[int]) -> None:
    watched = watched_ladder(Rejection, gammas)
    assert all(abs(watched.excess(tier)) < LIMIT for tier in range(1, len(gammas)))


@pytest.mark.parametrize("gammas", [[1, 1], [3, 1], [1, 2, 1]], ids=str)
def test_seeded_keeps_what_wins_both_races(gammas: list[int]) -> None:
    """Of the top tier only: a lower one may come back to a position, and finds the same noise there."""
    assert abs(watched_ladder(Seeded, gammas).excess(len(gammas) - 1)) < LIMIT


@pytest.mark.parametrize("mode", ["draft", "triforce", "lookup"])
def test_the_engine_keeps_what_the_laws_share(mode: str) -> None:
    batch = started(mode, "rejection", SamplingParams(max_tokens=40), 60)
    watched = Watched(batch.sampling.coupling, None, batch.prefix.ids_BS)
    batch.sampling = replace(batch.sampling, coupling=watched)
    finished(batch)
    for tier in range(1, len(batch.tiers)):
        assert abs(watched.excess(tier)) < LIMIT
        below = batch.tiers[tier - 1].counters
        assert below.kept_BN[:, 1:].sum() == torch.cat(watched.kept[tier]).sum()  # what the statistics report

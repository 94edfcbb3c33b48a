"""Acceptance by selection policy, agreement of the draft, and locality of selections, on one text.

Shape suffixes: N positions, V vocabulary, L layers, G KV heads, U units, C chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.acceptance.h2o import HeavyHitters
from benchmarks.acceptance.teacher_forcing import Walk
from triforce.arrays import Array
from triforce.backends.torch.tensors import as_tensor
from triforce.eval.agreement import overlap, same_pick
from triforce.kvcache import PAGE, Budget, FullView, RetrievalConfig, RetrievalView
from triforce.kvcache.selection import POLICIES, MeanKey, Observed, Policy, Recent

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Selection:
    """A policy, its refresh interval, and whether it may see the verification to come."""

    policy: Callable[[Walk], Policy]
    refresh: int = 1
    foresight: bool = False


def _independent(policy: Callable[[], Policy]) -> Callable[[Walk], Policy]:
    """Return a factory that needs to know nothing of the walk."""
    return lambda walk: policy()


SELECTIONS: dict[str, Selection] = {
    "oracle": Selection(_independent(Observed), foresight=True),
    **{name: Selection(_independent(policy)) for name, policy in POLICIES.items()},
    "mean_key, once": Selection(_independent(MeanKey), refresh=0),
    "h2o": Selection(lambda walk: HeavyHitters(walk.attended_LGU)),
    "recent": Selection(_independent(Recent)),
}
"""Policies of the product, the paper's Top-K oracle, H2O, and StreamingLLM (`recent`)."""


class Case(NamedTuple):
    """A setting of the retrieval view."""

    selection: str
    budget: int
    chunk: int
    full_layers: int

    @property
    def how(self) -> Selection:
        return SELECTIONS[self.selection]

    def view(self, walk: Walk) -> RetrievalView:
        """Return a fresh view of what is walked through."""
        return walk.lower(lambda: self.how.policy(walk), self.setting(self.how.refresh))

    def setting(self, refresh: int) -> RetrievalConfig:
        return RetrievalConfig(Budget(self.budget), self.chunk, refresh, frozenset(range(self.full_layers)))


def cases(budgets: Iterable[int], chunks: Iterable[int], layers: Iterable[int], base_case: Case) -> list[Case]:
    """Return all selections at every budget, chunk size and number of full layers, the rest being as usual."""
    settings = [
        base_case,
        *(base_case._replace(budget=budget) for budget in budgets),
        *(base_case._replace(chunk=chunk) for chunk in chunks),
        *(base_case._replace(full_layers=full_layers) for full_layers in layers),
    ]
    return list(dict.fromkeys(setting._replace(selection=name) for setting in settings for name in SELECTIONS))


def laws(walk: Walk, case: Case) -> tuple[Tensor, Tensor]:
    """Return probabilities at the measured positions, (N, V): under a view, and exact."""
    _, view_laws, exact_laws = zip(*walk.under(case.view(walk), case.how.foresight), strict=True)
    return torch.cat(view_laws), torch.cat(exact_laws)


def acceptance(walk: Walk, case: Case) -> Row:
    """Return the acceptance of a retrieval view's proposals, and how often the target's first choice is the text."""
    view_NV, exact_NV = laws(walk, case)
    right = float((exact_NV.argmax(-1) == walk.measured_N).double().mean())
    return {**about(walk), **case._asdict(), **_agree(exact_NV, view_NV), "right": right}


def drafting(walk: Walk, base_case: Case) -> list[Row]:
    """Return the acceptance of the draft model's proposals by the exact view and by the retrieval view."""
    draft_NV = walk.draft()
    retrieval_NV, exact_NV = laws(walk, base_case)
    judges = {"full": exact_NV, base_case.selection: retrieval_NV}
    return [{**about(walk), "verifier": name, **_agree(laws_NV, draft_NV)} for name, laws_NV in judges.items()]


def about(walk: Walk) -> Row:
    """Return workload, source and context of a walk."""
    return {"workload": walk.work.name, "source": walk.work.source, "context": walk.work.prompt}


def _agree(p_NV: Tensor, q_NV: Tensor) -> Row:
    return {
        "positions": len(p_NV),
        "rejection": float(overlap(p_NV, q_NV).mean()),
        "seeded": float(same_pick(p_NV, q_NV).mean()),
    }


class Recorder:
    """A policy that selects as another one does, and keeps its last selection."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.observes = policy.observes
        self.latest_tokens = policy.latest_tokens
        self.picked_LGN: Array = np.empty(0)

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Array:
        self.picked_LGN = self.policy.pick(full, row, chunk, candidates, picks)
        return self.picked_LGN


def locality(walk: Walk, base_case: Case) -> list[Row]:
    """Return a row a layer, with values after each count of `tokens`; `base_case.selection` must be one that observes.

    `overlap`: of the chunks that were selected first, the share still selected. `recovered`: the share of the attention
    that falls on what is in sight, when selected anew at each verification; `recovered_once`: when only at first.
    """
    anew = _follow(walk, base_case, refresh=1)
    once = _follow(walk, base_case, refresh=0)
    first_LGC = anew[0][1]
    curves = {
        "overlap": [(chosen & first_LGC).sum((1, 2)) / first_LGC.sum((1, 2)) for _, chosen, _ in anew],
        "recovered": [recovered_L for *_, recovered_L in anew],
        "recovered_once": [recovered_L for *_, recovered_L in once],
    }
    return [
        {**about(walk), "layer": layer, "tokens": [token for token, *_ in anew]}
        | {name: [round(float(values_L[layer]), 4) for values_L in steps] for name, steps in curves.items()}
        for layer in range(len(first_LGC))
    ]


def _follow(walk: Walk, base_case: Case, refresh: int) -> list[tuple[int, Tensor, Tensor]]:
    """Return for each verification: tokens since the prompt, chunks picked (L, G, C), attention in sight (L)."""
    recorder = Recorder(base_case.how.policy(walk))
    view = walk.lower(lambda: recorder, base_case.setting(refresh))
    chunks = ceil(len(walk.work.ids) / base_case.chunk)
    steps = []
    for span, *_ in walk.under(view):
        picked_LGN = as_tensor(recorder.picked_LGN)
        chosen_LGC = torch.zeros(*picked_LGN.shape[:2], chunks, dtype=torch.bool, device=picked_LGN.device)
        chosen_LGC.scatter_(2, picked_LGN, True)
        visible_LGC = chosen_LGC.clone()
        visible_LGC[..., : ceil(PAGE / base_case.chunk)] = True
        visible_LGC[..., ceil(view.selections[0].window_start / base_case.chunk) :] = True
        mass_LGC = _mass(walk.full, base_case.chunk, chunks)
        recovered_L = (mass_LGC * visible_LGC).sum((1, 2)) / mass_LGC.sum((1, 2))
        steps.append((span.start - walk.work.prompt, chosen_LGC, recovered_L))
    return steps


def _mass(full: FullView, chunk: int, chunks: int) -> Tensor:
    """Return the attention that the last verification gave each chunk, (L, G, C)."""
    mass_LGU = full.observations[0].mass_LGU
    units = chunk // full.grain
    assert mass_LGU is not None, "its views select by what is observed"
    whole_LGU = F.pad(as_tensor(mass_LGU), (0, chunks * units - mass_LGU.shape[2]))
    return whole_LGU.view(*whole_LGU.shape[:2], chunks, units).sum(3)

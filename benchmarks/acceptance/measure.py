"""Acceptance by selection policy, and agreement of the draft, on one text. N positions, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.acceptance.h2o import HeavyHitters
from benchmarks.acceptance.teacher_forcing import Walk
from triforce.eval.agreement import overlap, same_pick
from triforce.kvcache import Budget, RetrievalConfig, RetrievalView
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


def cases(budgets: Iterable[int], chunks: Iterable[int], layers: Iterable[int], usual: Case) -> list[Case]:
    """Return all selections at every budget, chunk size and number of full layers, the rest being as usual."""
    settings = [
        usual,
        *(usual._replace(budget=budget) for budget in budgets),
        *(usual._replace(chunk=chunk) for chunk in chunks),
        *(usual._replace(full_layers=full_layers) for full_layers in layers),
    ]
    return list(dict.fromkeys(setting._replace(selection=name) for setting in settings for name in SELECTIONS))


def laws(walk: Walk, case: Case) -> tuple[Tensor, Tensor]:
    """Return probabilities at the measured positions, (N, V): under a view, and exact."""
    _, guessed, exact = zip(*walk.under(case.view(walk), case.how.foresight), strict=True)
    return torch.cat(guessed), torch.cat(exact)


def acceptance(walk: Walk, case: Case) -> Row:
    """Return the acceptance of a retrieval view's proposals, and how often the target's first choice is the text."""
    guessed_NV, exact_NV = laws(walk, case)
    right = float((exact_NV.argmax(-1) == walk.measured_N).double().mean())
    return {**about(walk), **case._asdict(), **_agree(exact_NV, guessed_NV), "right": right}


def drafting(walk: Walk, usual: Case) -> list[Row]:
    """Return the acceptance of the draft model's proposals by the exact view and by the retrieval view."""
    draft_NV = walk.draft()
    retrieval_NV, exact_NV = laws(walk, usual)
    judges = {"full": exact_NV, usual.selection: retrieval_NV}
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

"""What is measured on a walk: acceptance by selection, agreement of the draft. N positions, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triforce.bench.acceptance.heavy import Heavy
from triforce.bench.acceptance.walk import Walk
from triforce.eval.agreement import overlap, same_pick
from triforce.kvcache import Budget, RetrievalConfig, RetrievalView
from triforce.kvcache.selection import POLICIES, MeanKey, Observed, Policy, Recent

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Selection:
    """A policy, how often it selects, and whether it may look at the verification to come."""

    policy: Callable[[Walk], Policy]
    refresh: int = 1
    foresight: bool = False


def _own(policy: Callable[[], Policy]) -> Callable[[Walk], Policy]:
    """One that needs to know nothing of the walk."""
    return lambda walk: policy()


SELECTIONS: dict[str, Selection] = {
    "oracle": Selection(_own(Observed), foresight=True),
    **{name: Selection(_own(policy)) for name, policy in POLICIES.items()},
    "mean_key, once": Selection(_own(MeanKey), refresh=0),
    "h2o": Selection(lambda walk: Heavy(walk.attended_LGU)),
    "recent": Selection(_own(Recent)),
}
"""Those of the product, and what to compare them with: the paper's Top-K oracle, H2O, and StreamingLLM (`recent`)."""


class Case(NamedTuple):
    """One setting of the retrieval view."""

    selection: str
    budget: int
    chunk: int
    full_layers: int

    @property
    def how(self) -> Selection:
        return SELECTIONS[self.selection]

    def view(self, walk: Walk) -> RetrievalView:
        """A fresh view of what it walks through."""
        return walk.lower(lambda: self.how.policy(walk), self.setting(self.how.refresh))

    def setting(self, refresh: int) -> RetrievalConfig:
        return RetrievalConfig(Budget(self.budget), self.chunk, refresh, frozenset(range(self.full_layers)))


def cases(budgets: Iterable[int], chunks: Iterable[int], layers: Iterable[int], usual: Case) -> list[Case]:
    """All selections at every budget, every chunk size and every number of full layers, the rest being as usual."""
    settings = [
        usual,
        *(usual._replace(budget=budget) for budget in budgets),
        *(usual._replace(chunk=chunk) for chunk in chunks),
        *(usual._replace(full_layers=full_layers) for full_layers in layers),
    ]
    return list(dict.fromkeys(setting._replace(selection=name) for setting in settings for name in SELECTIONS))


def laws(walk: Walk, case: Case) -> tuple[Tensor, Tensor]:
    """Laws of all positions asked for, (N, V): under a view, and exact."""
    _, guessed, exact = zip(*walk.under(case.view(walk), case.how.foresight), strict=True)
    return torch.cat(guessed), torch.cat(exact)


def acceptance(walk: Walk, case: Case) -> Row:
    """How the exact view takes what a retrieval view proposes, and how often its own first choice is the text."""
    guessed_NV, exact_NV = laws(walk, case)
    right = float((exact_NV.argmax(-1) == walk.asked_N).double().mean())
    return {**about(walk), **case._asdict(), **_agree(exact_NV, guessed_NV), "right": right}


def drafting(walk: Walk, usual: Case) -> list[Row]:
    """How the exact view and the retrieval view take what the draft model proposes."""
    draft_NV = walk.draft()
    retrieval_NV, exact_NV = laws(walk, usual)
    judges = {"full": exact_NV, usual.selection: retrieval_NV}
    return [{**about(walk), "verifier": name, **_agree(laws_NV, draft_NV)} for name, laws_NV in judges.items()]


def about(walk: Walk) -> Row:
    """What was read."""
    return {"workload": walk.work.name, "source": walk.work.source, "context": walk.work.prompt}


def _agree(p_NV: Tensor, q_NV: Tensor) -> Row:
    return {
        "positions": len(p_NV),
        "rejection": float(overlap(p_NV, q_NV).mean()),
        "seeded": float(same_pick(p_NV, q_NV).mean()),
    }

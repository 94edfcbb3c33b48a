"""Statistics of a generation, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from triforce.interface.frozen_fields import fields_frozen


@dataclass(slots=True)
class TierStats:
    """Statistics of one tier in a generation, prefill apart."""

    name: str  # full, retrieval, streaming, ngram or draft
    proposed: int = 0  # tokens handed to the tier above
    accepted: int = 0  # of these, tokens that it kept
    passes: int = 0  # forward passes
    seconds: float = 0.0  # of decoding
    prefill_seconds: float = 0.0  # of reading the prompt
    histogram: list[int] = field(default_factory=list)  # [i]: verifications by the tier above that kept i tokens
    visible_tokens: int | None = None  # of the text, in the mean of its layers without a window; None: all

    @property
    def acceptance(self) -> float | None:
        """Share of the proposed tokens that were kept; None where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None


@dataclass(slots=True)
class PlanSegment:
    """Proposals of the full tier for one text, one after the other, in which mode auto kept to a plan."""

    plan: str  # tiers and their gammas
    proposals: int = 0  # of the full tier
    tokens: int = 0  # new ones
    seconds: float = 0.0  # of decoding
    predicted: float = 0.0  # tokens per second that the plan promised when it was chosen; 0: nothing was known
    plain: float = 0.0  # the same of plain decoding
    budget: int | None = None  # tokens that the retrieval tier was to read, where that was chosen, too
    reason: str = ""  # for which it was chosen
    score: float = 0.0  # tokens per second by which it was chosen, with what may be hoped for
    rival: str = ""  # the best plan of other tiers then, and its score
    rival_score: float = 0.0
    cause: str = ""  # what plans were weighed for


@fields_frozen
@dataclass(frozen=True, slots=True)
class TierBelief:
    """Belief of mode auto about a tier: milliseconds of a pass over one token and over eight, and acceptance."""

    name: str
    milliseconds: tuple[float, float]
    passes: float  # that the cost was learnt from
    acceptance: float | None  # share of its draft tokens to expect; None of the full tier
    deviation: float  # standard deviation of that
    tokens: float  # draft tokens of this text that it was learnt from


@fields_frozen
@dataclass(frozen=True, slots=True)
class WeighedPlan:
    """A plan that mode auto weighed: the best one of its tiers, in tokens per second of a text."""

    plan: str
    rate: float  # to expect
    score: float  # with what may be hoped for, by which plans are chosen; 0 where it risks more than may be lost


@fields_frozen
@dataclass(frozen=True, slots=True)
class PlanReport:
    """Report of what mode auto believed when it last weighed plans in a text. weighed: plain decoding first."""

    tiers: list[TierBelief]
    weighed: list[WeighedPlan]
    won: float  # seconds that speculation won against plain decoding, by these costs
    headroom: float  # seconds that a plan may still risk


def since(began: PlanSegment, ended: PlanSegment) -> PlanSegment:
    """Return what happened between two segments, each of which counts all that was before."""
    counts = {name: getattr(ended, name) - getattr(began, name) for name in ("proposals", "tokens", "seconds")}
    return replace(began, **counts)


def plans(timeline: Iterable[PlanSegment]) -> dict[str, int]:
    """Return plans, and for how many proposals each was used."""
    found: dict[str, int] = {}
    for segment in timeline:
        found[segment.plan] = found.get(segment.plan, 0) + segment.proposals
    return found


def total(outputs: Iterable[Sequence[TierStats]]) -> list[TierStats]:
    """Add up statistics of several outputs, tier by tier. Of seconds the most count, as outputs share passes."""
    sums: dict[str, TierStats] = {}
    for tier in (tier for tiers in outputs for tier in tiers):
        into = sums.setdefault(tier.name, TierStats(tier.name))
        into.proposed += tier.proposed
        into.accepted += tier.accepted
        into.passes += tier.passes
        into.seconds = max(into.seconds, tier.seconds)
        into.visible_tokens = tier.visible_tokens
        into.histogram = [x + y for x, y in zip_longest(into.histogram, tier.histogram, fillvalue=0)]
    return list(sums.values())

"""Modes: functions that put tiers on top of each other, for a batch of rows. Couplings: how drafts are verified.

Every baseline and every ablation of the paper (Sun et al. 2024) is one of these, run by the same code.
"""

from __future__ import annotations

from collections.abc import Callable

from triforce.engine.tier_builder import TierBuilder
from triforce.kvcache import FullView
from triforce.kvcache.selection import POLICIES, Recent
from triforce.speculation import BlockRejection, NgramProposer, Proposer, Rejection, Seeded, Tier

ModeBuilder = Callable[[TierBuilder], Tier[FullView]]


def ar(build: TierBuilder) -> Tier[FullView]:
    """Plain autoregressive decoding."""
    return build.exact(build.full())


def draft(build: TierBuilder) -> Tier[FullView]:
    """A small model verified by the target: classic speculation (the paper's first baseline)."""
    below = build.lowest()  # first: it may raise, and no pages are to be taken then
    return build.exact(build.full(), below)


def retrieval(build: TierBuilder, below: Proposer | None = None) -> Tier[FullView]:
    """The target drafts for itself through selected pages (the paper's ablation without hierarchy: nothing below)."""
    full = build.full()
    return build.exact(full, build.middle(full, POLICIES[build.speculation.retrieval_policy], "retrieval", below))


def streaming(build: TierBuilder) -> Tier[FullView]:
    """The hierarchy with StreamingLLM in the place of retrieval (the paper's ablation); without a draft, two tiers."""
    below = build.lowest() if build.models.drafts else None
    full = build.full()
    return build.exact(full, build.middle(full, Recent, "streaming", below))


def triforce(build: TierBuilder) -> Tier[FullView]:
    """Draft model, retrieval, full cache (Algorithm 1)."""
    return retrieval(build, build.lowest())


def ngram(build: TierBuilder) -> Tier[FullView]:
    """TriForce with n-grams of the text itself in the place of the draft model."""
    return retrieval(build, NgramProposer(len(build.capacities), build.speculation.draft_tokens))


def draft_ngram(build: TierBuilder) -> Tier[FullView]:
    """TriForce whose draft model gives way to n-grams where the text repeats itself."""
    return retrieval(build, NgramProposer(len(build.capacities), build.speculation.draft_tokens, build.lowest()))


def auto(build: TierBuilder) -> Tier[FullView]:
    """All tiers there are, for a `PlanController` to choose from."""
    return triforce(build) if build.models.drafts else retrieval(build)


MODES: dict[str, ModeBuilder] = {
    "ar": ar, "draft": draft, "retrieval": retrieval, "streaming": streaming, "triforce": triforce, "ngram": ngram,
    "draft-ngram": draft_ngram, "auto": auto,
}  # fmt: skip

COUPLINGS: dict[str, type[Seeded] | type[Rejection]] = {
    "seeded": Seeded,
    "rejection": Rejection,
    "block": BlockRejection,
}

DRAFTED = ("draft", "triforce", "draft-ngram")


def unlinked(top: Tier[FullView]) -> list[Proposer]:
    """The tiers of `auto` for a plan controller, which links them: n-grams first, then from the lowest to the full one.

    `top` loses the tiers below it. Levels are places in the list; they name the tiers in the noise and in the origins
    of tokens.
    """
    parts = [NgramProposer(len(top.cache.lengths_B)), *tiers(top)]
    top.below = None
    for level, tier in enumerate(parts):
        tier.level = level
    return parts


def tiers(top: Proposer) -> list[Proposer]:
    """List a tier and those below it, from the lowest up."""
    return [*(tiers(top.below) if top.below else []), top]

"""Modes are functions: which tiers stand on which, for a batch of rows.

Every baseline and every ablation of the paper (Sun et al. 2024) is one of these, run by the same code."""

from __future__ import annotations

from collections.abc import Callable

from triforce.engine.tier_builder import ModelSet, TierBuilder
from triforce.kvcache import FullView
from triforce.kvcache.selection import POLICIES, Recent
from triforce.speculation import NgramProposer, Proposer, Tier

ModeBuilder = Callable[[TierBuilder], Tier[FullView]]


def ar(rows: TierBuilder) -> Tier[FullView]:
    """Plain autoregressive decoding."""
    return rows.exact(rows.full())


def draft(rows: TierBuilder) -> Tier[FullView]:
    """A naive small model verified by the target: classic speculation (the paper's first baseline)."""
    below = rows.lowest()  # first: it may raise, and no pages are to be taken then
    return rows.exact(rows.full(), below)


def retrieval(rows: TierBuilder) -> Tier[FullView]:
    """The target drafts for itself through selected pages (the paper's ablation without hierarchy)."""
    full = rows.full()
    return rows.exact(full, rows.middle(full, POLICIES[rows.setting.retrieval_policy], "retrieval"))


def streaming(rows: TierBuilder) -> Tier[FullView]:
    """The hierarchy with StreamingLLM in the place of retrieval (the paper's ablation); without a draft, two tiers."""
    below = rows.lowest() if rows.models.draft else None
    full = rows.full()
    return rows.exact(full, rows.middle(full, Recent, "streaming", below))


def triforce(rows: TierBuilder) -> Tier[FullView]:
    """Draft model, retrieval, full cache (Algorithm 1)."""
    below = rows.lowest()
    full = rows.full()
    return rows.exact(full, rows.middle(full, POLICIES[rows.setting.retrieval_policy], "retrieval", below))


def ngram(rows: TierBuilder) -> Tier[FullView]:
    """TriForce with n-grams of the text itself in the place of the draft model."""
    full = rows.full()
    below = NgramProposer(len(rows.capacities), rows.setting.draft_tokens)
    return rows.exact(full, rows.middle(full, POLICIES[rows.setting.retrieval_policy], "retrieval", below))


def draft_ngram(rows: TierBuilder) -> Tier[FullView]:
    """TriForce whose draft model gives way to n-grams where the text repeats itself."""
    below = NgramProposer(len(rows.capacities), rows.setting.draft_tokens, rows.lowest())
    full = rows.full()
    return rows.exact(full, rows.middle(full, POLICIES[rows.setting.retrieval_policy], "retrieval", below))


def auto(rows: TierBuilder) -> Tier[FullView]:
    """All the tiers there are, for a pilot to choose from (see triforce.planner)."""
    return triforce(rows) if rows.models.draft else retrieval(rows)


MODES: dict[str, ModeBuilder] = {
    "ar": ar, "draft": draft, "retrieval": retrieval, "streaming": streaming, "triforce": triforce, "ngram": ngram,
    "draft-ngram": draft_ngram, "auto": auto,
}  # fmt: skip

DRAFTED = ("draft", "triforce", "draft-ngram")


def runnable(models: ModelSet) -> list[str]:
    """The modes that these models can run."""
    return [mode for mode in MODES if models.draft or mode not in DRAFTED]


def tiers(top: Proposer) -> list[Proposer]:
    """The tiers of a ladder, from the lowest to the full one."""
    return [*(tiers(top.below) if top.below else []), top]

"""Why a generation was as fast as it was: what each tier cost and gave, what was chosen when, what might be better.

All of it comes from what was measured in that generation; nothing is run for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from triforce.interface.stats import PlanSegment, TierStats, plans

PLAIN = "full"
"""The plan that is plain decoding."""

ENOUGH = 40  # guesses, or proposals, to say something of
POOR, GOOD, ALL = 0.4, 0.8, 0.9  # shares of guesses kept
CLEAR = 1.1  # times as fast: less is noise


@dataclass(frozen=True, slots=True)
class TierReport:
    """A tier: its passes, what one takes, its share of the decoding time, and how its guesses fared."""

    name: str
    passes: int
    milliseconds: float
    time: float
    proposed: int
    acceptance: float | None
    visible_tokens: int | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Of all texts of a request; the timeline is the first one's. Tokens per second are of all texts together."""

    mode: str
    prompt_tokens: int
    new_tokens: int
    tokens_per_second: float
    predicted: float | None  # tokens per second; None where nothing was chosen, or nothing known
    plain: float | None  # what plain decoding would give, by the cost of its passes; None where that is not known
    tiers: list[TierReport]
    timeline: list[PlanSegment]
    advice: list[str]

    def as_json(self) -> dict[str, Any]:
        """The same as numbers, strings, lists and dictionaries."""
        return asdict(self)


def explain(
    mode: str,
    prompt: int,
    timelines: Sequence[list[PlanSegment]],
    tiers: Sequence[TierStats],
    tokens: Sequence[int],
    seconds: tuple[float, float],
) -> Explanation:
    """For each text its timeline and tokens; of all of them the tiers, and the seconds of prefill and decoding."""
    (_, decoding), texts, new = seconds, len(tokens), sum(tokens)
    speed = new / decoding if decoding else 0.0
    ours = Explanation(
        mode,
        prompt,
        new,
        speed,
        _predicted(timelines[0], "predicted", texts),
        _plain(mode, timelines[0], tiers, texts, speed),
        [_part(tier, decoding) for tier in tiers],
        timelines[0],
        [],
    )
    plainly = [line for rule in PLAINLY if (line := rule(ours, tiers, seconds))]
    rules = OTHERS if plainly else GUESSING + OTHERS
    ours.advice.extend(plainly + [line for rule in rules if (line := rule(ours, tiers, seconds))])
    return ours


def _part(tier: TierStats, decoding: float) -> TierReport:
    each = 1000 * tier.seconds / tier.passes if tier.passes else 0.0
    time = tier.seconds / decoding if decoding else 0.0
    return TierReport(tier.name, tier.passes, each, time, tier.proposed, tier.acceptance, tier.visible_tokens)


def _predicted(timeline: Sequence[PlanSegment], what: str, texts: int) -> float | None:
    """The mean over the time for which there was one."""
    known = [stretch for stretch in timeline if getattr(stretch, what)]
    seconds = sum(stretch.seconds for stretch in known)
    return texts * sum(getattr(s, what) * s.seconds for s in known) / seconds if seconds else None


def _plain(
    mode: str, timeline: Sequence[PlanSegment], tiers: Sequence[TierStats], texts: int, speed: float
) -> float | None:
    """A pass that verifies guesses takes no less than one of plain decoding: that gives at least so many tokens."""
    if mode == "ar":
        return speed
    full = tiers[-1]
    verified = full.passes / full.seconds if full.seconds and texts == 1 else None
    return _predicted(timeline, "plain", texts) or verified


def _short(ours: Explanation, tiers: Sequence[TierStats], seconds: tuple[float, float]) -> str | None:
    chosen = plans(ours.timeline)
    if sum(chosen.values()) < ENOUGH or chosen.get(PLAIN, 0) <= 0.5 * sum(chosen.values()):
        return None
    lower = next((tier for tier in tiers if tier.name == "retrieval" and tier.visible_tokens is not None), None)
    full = ours.tiers[-1]
    if lower and lower.visible_tokens is not None and lower.visible_tokens < ours.prompt_tokens / 2:
        return "too little of what the lower tiers guess is kept, or they cost too much: plain decoding is best"
    return (
        f"your prompt is short: plain decoding is best. A pass over its {ours.prompt_tokens:,} tokens takes "
        f"{full.milliseconds:.2f} ms, which guesses save too little of"
    )


def _slower(ours: Explanation, tiers: Sequence[TierStats], seconds: tuple[float, float]) -> str | None:
    if ours.mode in ("ar", "auto") or not ours.plain or ours.plain < CLEAR * ours.tokens_per_second:
        return None
    return (
        f"this mode is slower than plain decoding, which would give {ours.plain:.0f} tokens/s or more: use --mode "
        "auto, which goes back to plain decoding where guesses do not pay"
    )


def _budget(ours: Explanation, tiers: Sequence[TierStats], seconds: tuple[float, float]) -> str | None:
    tier = next((tier for tier in tiers if tier.name == "retrieval"), None)
    if not tier or tier.visible_tokens is None or tier.proposed < ENOUGH or tier.acceptance is None:
        return None
    chosen = [stretch.budget for stretch in ours.timeline if stretch.budget]
    if ours.mode == "auto" and not (chosen and chosen[-1] > chosen[0]):  # more was weighed, and promised less
        return None
    if tier.acceptance < GOOD and tier.visible_tokens < ours.prompt_tokens:
        return (
            f"a larger budget would have more guesses kept: the retrieval tier sees {tier.visible_tokens:,} of "
            f"{ours.prompt_tokens:,} tokens, and {tier.acceptance:.0%} of what it proposes is kept "
            f"(--retrieval-budget{f' {2 * chosen[-1]}; {chosen[-1]:,} is the most that auto tries' if chosen else ''})"
        )
    return None


def _gamma(ours: Explanation, tiers: Sequence[TierStats], seconds: tuple[float, float]) -> str | None:
    tier = tiers[-2] if len(tiers) > 1 and ours.mode not in ("auto", "draft") else None
    if not tier or sum(tier.histogram) < ENOUGH / 2 or (tier.acceptance or 0.0) < ALL:
        return None
    return (
        f"{tier.acceptance:.0%} of what the {tier.name} tier gathers is kept: a larger --speculative-tokens would "
        "save passes of the full tier; --mode auto finds it"
    )


def _draft(ours: Explanation, tiers: Sequence[TierStats], seconds: tuple[float, float]) -> str | None:
    tier = next((tier for tier in tiers if tier.name == "draft" and tier.proposed >= ENOUGH), None)
    if not tier or tier.acceptance is None or tier.acceptance >= POOR:
        return None
    return (
        f"the draft model guesses poorly here, {tier.acceptance:.0%} is kept: another --draft, or a lower temperature, "
        "would help more than another budget"
    )


def _repeats(ours: Explanation, tiers: Sequence[TierStats], seconds: tuple[float, float]) -> str | None:
    tier = next((tier for tier in tiers if tier.name == "ngram"), None)
    if not tier or tier.accepted < max(ENOUGH, ours.new_tokens / 2):
        return None
    return (
        f"the text repeats itself: {tier.accepted:,} guesses copied from it were kept. Do not expect this speed of a "
        "text that does not"
    )


def _reading(ours: Explanation, tiers: Sequence[TierStats], seconds: tuple[float, float]) -> str | None:
    prefill, decoding = seconds
    if prefill < 1 or prefill < 4 * decoding:
        return None
    return (
        f"{prefill / (prefill + decoding):.0%} of the time went into reading the prompt: --save-cache and --load-cache "
        "keep what was read, and so does a server"
    )


PLAINLY = (_short, _slower)
"""Rules: each says something, or nothing, from what was measured. Where one of these does, plain decoding is best."""
GUESSING = (_budget, _gamma, _draft)
"""What may improve guesses where these pay."""
OTHERS = (_repeats, _reading)

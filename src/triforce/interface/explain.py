"""Explanation of the speed of a generation: what each tier cost and gave, what was chosen when, what might be better.

All of it comes from measurements of that generation; nothing is run for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triforce.errors import argument, worded
from triforce.interface.frozen_fields import fields_frozen
from triforce.interface.json_values import json_value
from triforce.interface.stats import PlanReport, PlanSegment, TierStats, plans

PLAIN = "full"
"""The plan that is plain decoding."""

ENOUGH = 40  # guesses, or proposals, to say something of
POOR, GOOD, ALL = 0.4, 0.8, 0.9  # shares of guesses kept
CLEAR = 1.1  # times as fast: less is noise


@fields_frozen
@dataclass(frozen=True, slots=True)
class TierReport:
    """A tier: its passes, milliseconds of one, its share of the decoding time, and how its draft tokens fared."""

    name: str
    passes: int
    milliseconds: float
    time: float
    proposed: int
    acceptance: float | None
    visible_tokens: int | None


@fields_frozen
@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of all texts of a request together; the timeline is that of the first."""

    mode: str
    prompt_tokens: int
    new_tokens: int
    tokens_per_second: float
    predicted: float | None  # tokens per second; None where nothing was chosen, or nothing known
    plain: float | None  # what plain decoding would give, by the cost of its passes; None where that is not known
    tiers: list[TierReport]
    timeline: list[PlanSegment]
    advice: list[str]
    report: PlanReport | None = None  # what mode auto believed when it weighed plans last

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON keeps them."""
        return dict(json_value(self))


def explain(
    mode: str,
    prompt: int,
    timelines: Sequence[list[PlanSegment]],
    tiers: Sequence[TierStats],
    tokens: Sequence[int],
    seconds: tuple[float, float],
    report: PlanReport | None = None,
) -> Explanation:
    """Explain a generation. timelines, tokens: of each text. tiers, seconds (of prefill, of decoding): of all.

    report: of the first text.
    """
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
        report,
    )
    by_name = {tier.name: tier for tier in tiers}
    plainly = list(_on_plain_decoding(ours, by_name))
    advice = [*(plainly or _on_drafts(ours, by_name)), *_on_the_rest(ours, by_name, seconds)]
    ours.advice.extend(map(worded, advice))
    return ours


def _part(tier: TierStats, decoding: float) -> TierReport:
    each = 1000 * tier.seconds / tier.passes if tier.passes else 0.0
    time = tier.seconds / decoding if decoding else 0.0
    return TierReport(tier.name, tier.passes, each, time, tier.proposed, tier.acceptance, tier.visible_tokens)


def _predicted(timeline: Sequence[PlanSegment], what: str, texts: int) -> float | None:
    """Return the mean of a speed over the time for which there was one, of all texts."""
    known = [segment for segment in timeline if getattr(segment, what)]
    seconds = sum(segment.seconds for segment in known)
    return texts * sum(getattr(s, what) * s.seconds for s in known) / seconds if seconds else None


def _plain(
    mode: str, timeline: Sequence[PlanSegment], tiers: Sequence[TierStats], texts: int, speed: float
) -> float | None:
    """Tokens per second of plain decoding, at least: a pass of it takes no more time than one that verifies a draft."""
    if mode == "ar":
        return speed
    full = tiers[-1]
    verified = full.passes / full.seconds if full.seconds and texts == 1 else None
    return _predicted(timeline, "plain", texts) or verified


def _on_plain_decoding(ours: Explanation, by_name: Mapping[str, TierStats]) -> Iterator[str]:
    """Yield advice where plain decoding is best."""
    chosen = plans(ours.timeline)
    if sum(chosen.values()) >= ENOUGH and chosen.get(PLAIN, 0) > 0.5 * sum(chosen.values()):
        lower = by_name.get("retrieval")
        if lower and lower.visible_tokens is not None and lower.visible_tokens < ours.prompt_tokens / 2:
            yield "too few tokens of the lower tiers are accepted, or they cost too much: plain decoding is best"
        else:
            yield (
                f"your prompt is short: plain decoding is best. A pass over its {ours.prompt_tokens:,} tokens takes "
                f"{ours.tiers[-1].milliseconds:.2f} ms, which draft tokens save too little of"
            )
    if ours.mode not in ("ar", "auto") and ours.plain and ours.plain >= CLEAR * ours.tokens_per_second:
        yield (
            f"this mode is slower than plain decoding, which would give {ours.plain:.0f} tokens/s or more: use "
            f"{argument('mode', 'auto')}, which goes back to plain decoding where draft tokens do not pay"
        )


def _on_drafts(ours: Explanation, by_name: Mapping[str, TierStats]) -> Iterator[str]:
    """Yield advice for better drafts, where these pay."""
    tier, chosen = by_name.get("retrieval"), [segment.budget for segment in ours.timeline if segment.budget]
    refused = ours.mode == "auto" and not (chosen and chosen[-1] > chosen[0])  # more was weighed, and promised less
    if tier and tier.visible_tokens is not None and tier.proposed >= ENOUGH and not refused:
        accepted = tier.accepted / tier.proposed
        if accepted < GOOD and tier.visible_tokens < ours.prompt_tokens:
            most = f" {2 * chosen[-1]}; {chosen[-1]:,} is the most that auto tries" if chosen else ""
            yield (
                f"a larger budget would have more accepted: the retrieval tier sees {tier.visible_tokens:,} of "
                f"{ours.prompt_tokens:,} tokens, and {accepted:.0%} of what it proposes is accepted "
                f"({argument('retrieval_budget')}{most})"
            )
    tier = list(by_name.values())[-2] if len(by_name) > 1 and ours.mode not in ("auto", "draft") else None
    if tier and sum(tier.histogram) >= ENOUGH / 2 and (tier.acceptance or 0.0) >= ALL:
        yield (
            f"{tier.acceptance:.0%} of what the {tier.name} tier gathers is accepted: a larger "
            f"{argument('speculative_tokens')} would save passes of the full tier; {argument('mode', 'auto')} finds it"
        )
    tier = by_name.get("draft")
    if tier and tier.proposed >= ENOUGH and (accepted := tier.accepted / tier.proposed) < POOR:
        yield (
            f"the draft model drafts poorly here, {accepted:.0%} is accepted: another {argument('draft')}, or a lower "
            "temperature, would help more than another budget"
        )


def _on_the_rest(ours: Explanation, by_name: Mapping[str, TierStats], seconds: tuple[float, float]) -> Iterator[str]:
    """Yield advice that holds whatever the tiers did."""
    (prefill, decoding), tier = seconds, by_name.get("ngram")
    if tier and tier.accepted >= max(ENOUGH, ours.new_tokens / 2):
        yield (
            f"the text repeats itself: {tier.accepted:,} tokens copied from it were accepted. Do not expect this "
            "speed of a text that does not"
        )
    if prefill >= 1 and prefill >= 4 * decoding:
        yield (
            f"{prefill / (prefill + decoding):.0%} of the time went into reading the prompt: {argument('save_cache')} "
            f"and {argument('load_cache')} keep what was read, and so does a server"
        )

"""Explanation of the speed of a generation: cost and yield of each tier, plans over time, and advice.

It uses only measurements of that generation and runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any

from triforce.errors import argument, format_arguments
from triforce.interface.frozen_fields import fields_frozen


@dataclass(slots=True)
class TierStats:
    """Statistics of one tier in a generation. Prefill is counted separately."""

    name: str  # full, retrieval, streaming, ngram or draft
    proposed: int = 0  # tokens proposed to the tier above
    accepted: int = 0  # proposed tokens that the tier above accepted
    passes: int = 0  # forward passes
    seconds: float = 0.0  # of decoding
    prefill_seconds: float = 0.0  # of reading the text; in mode auto a draft reads it in the time of decoding
    histogram: list[int] = field(default_factory=list)  # [i]: verifications by the tier above that accepted i tokens
    visible_tokens: int | None = None  # tokens that the tier sees, mean over layers without a window; None: all

    @property
    def acceptance(self) -> float | None:
        """Share of the proposed tokens that were accepted; None where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None


@dataclass(slots=True)
class PlanSegment:
    """Consecutive engine steps of one text with one plan of mode auto. Each step is one proposal of the full tier."""

    plan: str  # tiers and their gammas
    proposals: int = 0  # number of proposals of the full tier
    tokens: int = 0  # new tokens
    seconds: float = 0.0  # of decoding
    predicted: float = 0.0  # tokens per second predicted for the plan when it was chosen; 0: unknown
    plain: float = 0.0  # tokens per second predicted for plain decoding at that time
    budget: int | None = None  # KV tokens of the retrieval tier, where the plan chose them
    reason: str = ""  # why the plan was chosen
    score: float = 0.0  # tokens per second with an exploration bonus, by which it was chosen
    rival: str = ""  # the best plan of other tiers at that time
    rival_score: float = 0.0  # score of the rival
    cause: str = ""  # why plans were weighed


@fields_frozen
@dataclass(frozen=True, slots=True)
class TierBelief:
    """Estimates of mode auto for a tier: milliseconds of a pass over one token and over eight, and acceptance."""

    name: str  # of the tier
    milliseconds: tuple[float, float]  # of a pass over one token, and over eight
    passes: float  # passes behind the estimate of the cost
    acceptance: float | None  # expected share of accepted draft tokens; None for the full tier
    deviation: float  # standard deviation of the acceptance
    tokens: float  # draft tokens of this text behind the estimate of the acceptance


@fields_frozen
@dataclass(frozen=True, slots=True)
class WeighedPlan:
    """A candidate plan of mode auto: the best plan for its set of tiers. Rates are in tokens per second of a text."""

    plan: str  # tiers and their gammas
    rate: float  # expected
    score: float  # rate with an exploration bonus; the plan with the highest is chosen; 0: risks more than the headroom


@fields_frozen
@dataclass(frozen=True, slots=True)
class PlanReport:
    """Estimates of mode auto at its last planning in a text."""

    tiers: list[TierBelief]  # one for each tier that a plan may use
    weighed: list[WeighedPlan]  # candidate plans, plain decoding first
    won: float  # seconds that speculation saved against plain decoding, by the estimated costs of passes
    headroom: float  # seconds that a plan may still lose


def segment_difference(start: PlanSegment, end: PlanSegment) -> PlanSegment:
    """Return the difference of two cumulative segments."""
    counts = {name: getattr(end, name) - getattr(start, name) for name in ("proposals", "tokens", "seconds")}
    return replace(start, **counts)


def proposals_by_plan(timeline: Iterable[PlanSegment]) -> dict[str, int]:
    """Return the number of proposals by plan."""
    proposal_counts: dict[str, int] = {}
    for segment in timeline:
        proposal_counts[segment.plan] = proposal_counts.get(segment.plan, 0) + segment.proposals
    return proposal_counts


def total(outputs: Iterable[Sequence[TierStats]]) -> list[TierStats]:
    """Sum statistics of several outputs by tier. Seconds are the maximum, as outputs share passes."""
    sums: dict[str, TierStats] = {}
    for tier in (tier for tiers in outputs for tier in tiers):
        tier_sums = sums.setdefault(tier.name, TierStats(tier.name))
        tier_sums.proposed += tier.proposed
        tier_sums.accepted += tier.accepted
        tier_sums.passes += tier.passes
        tier_sums.seconds = max(tier_sums.seconds, tier.seconds)
        tier_sums.prefill_seconds = max(tier_sums.prefill_seconds, tier.prefill_seconds)
        tier_sums.visible_tokens = tier.visible_tokens
        tier_sums.histogram = [x + y for x, y in zip_longest(tier_sums.histogram, tier.histogram, fillvalue=0)]
    return list(sums.values())


def json_value(value: Any) -> Any:
    """Return a value in the types of JSON: dataclasses become dicts of their fields, infinities and NaN become None."""
    if is_dataclass(value):
        return {field.name: json_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): json_value(part) for key, part in value.items()}
    if hasattr(value, "_asdict"):
        return json_value(value._asdict())
    if isinstance(value, list | tuple):
        return [json_value(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def late_reading(mode: str, tiers: Sequence[TierStats]) -> float:
    """Return the seconds of decoding in which a draft read the text: in mode `auto` it does so behind the first token.

    The result is 0 where it read nothing.
    """
    return next((tier.prefill_seconds for tier in tiers if tier.name == "draft" and mode == "auto"), 0.0)


PLAIN = "full"
"""Name of the plan of plain decoding."""

MIN_SAMPLES = 40  # minimal number of draft tokens, or of proposals, for advice
LOW_ACCEPTANCE = 0.4
GOOD_ACCEPTANCE = 0.8
HIGH_ACCEPTANCE = 0.9
MIN_SPEEDUP = 1.1  # smaller speedups are noise


@fields_frozen
@dataclass(frozen=True, slots=True)
class TierReport:
    """A tier: its passes, milliseconds of a pass, share of the decoding time, and acceptance of its draft tokens."""

    name: str  # of the tier
    passes: int  # forward passes
    milliseconds: float  # mean of a pass
    time: float  # share of the decoding time, 0 to 1
    proposed: int  # tokens proposed to the tier above
    acceptance: float | None  # share of the proposed tokens that were accepted; None where nothing was proposed
    visible_tokens: int | None  # of the text, as `TierStats.visible_tokens`


@fields_frozen
@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of all texts of a request together; the timeline is that of the first text."""

    mode: str  # selects the tiers
    prompt_tokens: int  # of the prompt
    new_tokens: int  # of all texts together
    tokens_per_second: float  # of all texts together
    predicted: float | None  # tokens per second of the chosen plans; None where no plan was chosen or no rate known
    plain: float | None  # tokens per second of plain decoding, by the cost of its passes; None where unknown
    tiers: list[TierReport]  # from the lowest to the full tier
    timeline: list[PlanSegment]  # plans of mode auto in order, of the first text
    draft_reading: float  # seconds of decoding in which a draft read the text
    advice: list[str]  # sentences on settings that may be faster
    report: PlanReport | None = None  # estimates of mode auto at its last planning

    def to_dict(self) -> dict[str, Any]:
        """Return the fields in the types of JSON."""
        return dict(json_value(self))


def explain(
    mode: str,
    prompt_tokens: int,
    timelines: Sequence[list[PlanSegment]],
    tiers: Sequence[TierStats],
    new_tokens: Sequence[int],
    seconds: tuple[float, float],
    report: PlanReport | None = None,
) -> Explanation:
    """Explain a generation.

    timelines, new_tokens: one item for each text. tiers: statistics of all texts. seconds: durations of the prefill and
    of the decoding of all texts. report: estimates for the first text.
    """
    _, decoding = seconds
    text_count = len(new_tokens)
    all_new_tokens = sum(new_tokens)
    speed = all_new_tokens / decoding if decoding else 0.0
    explanation = Explanation(
        mode,
        prompt_tokens,
        all_new_tokens,
        speed,
        _mean_speed(timelines[0], "predicted", text_count),
        _plain_speed(mode, timelines[0], tiers, text_count, speed),
        [_tier_report(tier, decoding) for tier in tiers],
        timelines[0],
        late_reading(mode, tiers),
        [],
        report,
    )
    by_name = {tier.name: tier for tier in tiers}
    plain_advice = list(_plain_decoding_advice(explanation, by_name))
    advice = [*(plain_advice or _draft_advice(explanation, by_name)), *_general_advice(explanation, by_name, seconds)]
    explanation.advice.extend(map(format_arguments, advice))
    return explanation


def _tier_report(tier: TierStats, decoding: float) -> TierReport:
    pass_milliseconds = 1000 * tier.seconds / tier.passes if tier.passes else 0.0
    time_share = tier.seconds / decoding if decoding else 0.0
    return TierReport(
        tier.name, tier.passes, pass_milliseconds, time_share, tier.proposed, tier.acceptance, tier.visible_tokens
    )


def _mean_speed(timeline: Sequence[PlanSegment], speed_field: str, text_count: int) -> float | None:
    """Return the time-weighted mean of `speed_field` over segments that have it, times `text_count`.

    None stands for a timeline without such segments.
    """
    predicted_segments = [segment for segment in timeline if getattr(segment, speed_field)]
    seconds = sum(segment.seconds for segment in predicted_segments)
    expected_tokens = sum(getattr(segment, speed_field) * segment.seconds for segment in predicted_segments)
    return text_count * expected_tokens / seconds if seconds else None


def _plain_speed(
    mode: str, timeline: Sequence[PlanSegment], tiers: Sequence[TierStats], text_count: int, speed: float
) -> float | None:
    """Return a lower bound of the speed of plain decoding in tokens per second.

    A pass of plain decoding costs no more than a verification.
    """
    if mode == "ar":
        return speed
    full_tier = tiers[-1]
    verification_speed = full_tier.passes / full_tier.seconds if full_tier.seconds and text_count == 1 else None
    return _mean_speed(timeline, "plain", text_count) or verification_speed


def _plain_decoding_advice(explanation: Explanation, by_name: Mapping[str, TierStats]) -> Iterator[str]:
    """Yield advice where plain decoding is best."""
    counts = proposals_by_plan(explanation.timeline)
    if sum(counts.values()) >= MIN_SAMPLES and counts.get(PLAIN, 0) > 0.5 * sum(counts.values()):
        tier = by_name.get("retrieval")
        if tier and tier.visible_tokens is not None and tier.visible_tokens < explanation.prompt_tokens / 2:
            yield "the lower tiers cost too much, or too few of their tokens are accepted: plain decoding is best"
        else:
            yield (
                f"your prompt is short: plain decoding is best. A pass over its {explanation.prompt_tokens:,} tokens "
                f"takes only {explanation.tiers[-1].milliseconds:.2f} ms, too little for draft tokens to save time"
            )
    if (
        explanation.mode not in ("ar", "auto")
        and explanation.plain
        and explanation.plain >= MIN_SPEEDUP * explanation.tokens_per_second
    ):
        yield (
            f"this mode is slower than plain decoding, which would give {explanation.plain:.0f} tokens/s or more: use "
            f"{argument('mode', 'auto')}, which goes back to plain decoding where draft tokens do not pay"
        )


def _draft_advice(explanation: Explanation, by_name: Mapping[str, TierStats]) -> Iterator[str]:
    """Yield advice for better drafts where speculation pays."""
    tier = by_name.get("retrieval")
    budgets = [segment.budget for segment in explanation.timeline if segment.budget]
    # `auto` weighed larger budgets, and they promised less
    budget_settled = explanation.mode == "auto" and not (budgets and budgets[-1] > budgets[0])
    if tier and tier.visible_tokens is not None and tier.proposed >= MIN_SAMPLES and not budget_settled:
        accepted = tier.accepted / tier.proposed
        if accepted < GOOD_ACCEPTANCE and tier.visible_tokens < explanation.prompt_tokens:
            advice = f" {2 * budgets[-1]}; {budgets[-1]:,} is the most that auto tries" if budgets else ""
            yield (
                f"a larger budget would raise the acceptance: the retrieval tier sees {tier.visible_tokens:,} of "
                f"{explanation.prompt_tokens:,} tokens, and {accepted:.0%} of what it proposes is accepted "
                f"({argument('retrieval_budget')}{advice})"
            )
    tier = list(by_name.values())[-2] if len(by_name) > 1 and explanation.mode not in ("auto", "draft") else None
    if tier and sum(tier.histogram) >= MIN_SAMPLES / 2 and (tier.acceptance or 0.0) >= HIGH_ACCEPTANCE:
        yield (
            f"{tier.acceptance:.0%} of what the {tier.name} tier gathers is accepted: a larger "
            f"{argument('speculative_tokens')} would save passes of the full tier; {argument('mode', 'auto')} finds it"
        )
    tier = by_name.get("draft")
    if tier and tier.proposed >= MIN_SAMPLES and (accepted := tier.accepted / tier.proposed) < LOW_ACCEPTANCE:
        yield (
            f"the draft model drafts poorly here: {accepted:.0%} of its tokens are accepted. Another "
            f"{argument('draft')}, or a lower temperature, would help more than another budget"
        )


def _general_advice(
    explanation: Explanation, by_name: Mapping[str, TierStats], seconds: tuple[float, float]
) -> Iterator[str]:
    """Yield advice that does not depend on the tiers."""
    prefill, decoding = seconds
    tier = by_name.get("ngram")
    if tier and tier.accepted >= max(MIN_SAMPLES, explanation.new_tokens / 2):
        yield (
            f"the text repeats itself: {tier.accepted:,} tokens copied from it were accepted. A text without "
            "repetitions is slower"
        )
    if prefill >= 1 and prefill >= 4 * decoding:
        yield (
            f"{prefill / (prefill + decoding):.0%} of the time went into reading the prompt: {argument('save_cache')} "
            f"and {argument('load_cache')} keep what was read, and so does a server"
        )


@fields_frozen
@dataclass(frozen=True, slots=True)
class BreakEvenPoint:
    """The context from which on speculation pays, with a reason."""

    tokens: int | None  # the context in tokens; None where speculation does not pay
    verdict: str  # what follows the subject "Speculation" in a sentence: whether it pays, or why not
    basis: str  # the data behind the verdict
    learnt: bool = False  # whether the basis is measurements of earlier texts on this machine rather than arithmetic

    @property
    def sentence(self) -> str:
        """The verdict as a sentence."""
        return f"Speculation {self.verdict}."

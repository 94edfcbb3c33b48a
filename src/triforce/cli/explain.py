"""`triforce explain`: reasons for the speed of a generation."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from textwrap import fill

from triforce.cli.answer_output import reading_note
from triforce.cli.asked_prompt import resolve_prompt
from triforce.cli.engine_arguments import load, sampling
from triforce.cli.progress import Prefill, Seconds
from triforce.interface.explain import MIN_SAMPLES, Explanation, PlanReport, TierBelief, proposals_by_plan
from triforce.interface.quantities import counted
from triforce.tables import Table, percent

TIMELINE_LINES = 24  # that are printed of a timeline: at its beginning and its end


def run(options: Namespace) -> int:
    """Generate as `generate` does, and print statistics instead of the text."""
    sampling_values = sampling(options)
    asked_prompt = resolve_prompt(options)
    asked_prompt.print_remarks(options)
    options.model = asked_prompt.model
    prompt = asked_prompt.prompt
    llm = load(options)
    params = llm.sampling_params(**sampling_values)
    with Seconds("tokenizing the text"):
        ids = llm.encode(prompt)
    with Prefill() as progress:
        (output,) = llm.generate(ids, params, load_cache=options.load_cache, on_prefill=progress)
    explanation = output.explain()
    seed = output.outputs[0].seed
    if options.json:
        print(json.dumps({"seed": seed} | explanation.to_dict(), ensure_ascii=False, allow_nan=False))
        return 0
    print(f"seed {seed}\n")
    for table in tables(explanation):
        print(f"{table.plain()}\n")
    advice = [f"{line}." for line in explanation.advice] or [_without_advice(explanation)]
    print(*(fill(f"- {line}", 100, subsequent_indent="  ") for line in advice), sep="\n")
    return 0


def _without_advice(explanation: Explanation) -> str:
    """Return why there is no advice: too few proposals, or no faster setting."""
    proposals = sum(proposals_by_plan(explanation.timeline).values())
    if 0 < proposals < MIN_SAMPLES:
        return f"advice needs {MIN_SAMPLES} proposals, and this text has {proposals}: raise -n."
    return "these measurements suggest no faster setting."


def tables(explanation: Explanation) -> Iterator[Table]:
    """Yield tables: the work of each tier, the plans by time, and for mode auto the weighed plans and the estimates."""
    tier_rows = [
        (
            tier_report.name,
            f"{tier_report.passes:,}",
            f"{tier_report.milliseconds:.2f}",
            percent(tier_report.time),
            f"{tier_report.proposed:,}",
            percent(tier_report.acceptance),
            "all" if tier_report.visible_tokens is None else f"{tier_report.visible_tokens:,}",
        )
        for tier_report in explanation.tiers
    ]
    yield Table(
        "Tiers",
        _speed_note(explanation),
        ("tier", "passes", "ms each", "time", "proposed", "accepted", "visible"),
        tier_rows,
    )
    if explanation.timeline:
        yield Table("Plans", "Tokens/s are of the first text.", _PLANS, list(_timeline(explanation)))

    if explanation.report:
        yield Table("Weighed", _best_plan_note(explanation.report), _WEIGHED, list(_plan_rows(explanation.report)))
        yield Table("Beliefs", _BELIEFS_NOTE, _BELIEFS, [_tier_row(tier) for tier in explanation.report.tiers])


_BELIEFS_NOTE = (
    "Passes over 1 and 8 tokens. Acceptance of the ngram tier is relative to that of lookups replayed on earlier text."
)
_WEIGHED = ("plan", "tokens/s", "with bonus", "remark")
_BELIEFS = ("tier", "ms, 1 token", "ms, 8 tokens", "passes", "acceptance", "draft tokens")
_PLANS = (
    "plan", "budget", "from token", "proposals", "tokens", "tokens/s", "predicted", "with bonus", "next best", "reason",
)  # fmt: skip


def _tier_row(tier: TierBelief) -> tuple[str, ...]:
    """Return a tier's milliseconds by tokens of a pass, its acceptance, and the number of observations of each."""
    acceptance_text = "" if tier.acceptance is None else f"{tier.acceptance:.2f} ± {tier.deviation:.2f}"
    milliseconds_of_1, milliseconds_of_8 = tier.milliseconds
    return (
        tier.name,
        f"{milliseconds_of_1:.2f}",
        f"{milliseconds_of_8:.2f}",
        f"{tier.passes:.0f}",
        acceptance_text,
        f"{tier.tokens:.0f}",
    )


def _best_plan_note(report: PlanReport) -> str:
    """Return a note on the best plan at the last weighing, and on the balance of seconds that speculation won."""
    best_plan = max(report.weighed, key=lambda plan: plan.rate)
    plain_plan = report.weighed[0]
    balance_note = f"saved {report.won:.2f}" if report.won >= 0 else f"cost {-report.won:.2f}"
    return (
        f"By the estimates at the last planning, {best_plan.plan} would make {best_plan.rate:.1f} tokens/s, "
        f"plain decoding {plain_plan.rate:.1f}. Speculation {balance_note} s so far, and "
        f"may risk {max(0.0, report.headroom):.3f} s."
    )


def _plan_rows(report: PlanReport) -> Iterator[tuple[str, ...]]:
    """Yield the best plan of each choice of tiers, the chosen one first."""
    for plan in sorted(report.weighed, key=lambda plan: -plan.score):
        score = f"{plan.score:.0f}" if plan.score else ""
        yield plan.plan, f"{plan.rate:.0f}", score, "" if plan.score else "risks more than the headroom"


def _timeline(explanation: Explanation) -> Iterator[tuple[str, ...]]:
    """Yield the plans by time, each from the lowest tier up with its draft lengths.

    The middle of a long list is left out.
    """
    first_token = 0
    hidden_rows = len(explanation.timeline) - TIMELINE_LINES
    for row, segment in enumerate(explanation.timeline):
        if hidden_rows > 0 and row == TIMELINE_LINES // 2:
            yield (f"({hidden_rows} more)", *[""] * (len(_PLANS) - 1))
        if hidden_rows <= 0 or not TIMELINE_LINES // 2 <= row < TIMELINE_LINES // 2 + hidden_rows:
            rates = (segment.tokens / segment.seconds if segment.seconds else 0.0, segment.predicted, segment.score)
            counts = (first_token, segment.proposals, segment.tokens)
            budget = f"{segment.budget:,}" if segment.budget else ""
            rate_cells = (f"{rate:.0f}" if rate else "" for rate in rates)
            rival_text = f"{segment.rival_score:.0f} {segment.rival}" if segment.rival_score else segment.rival
            reason = f"{segment.reason}; weighed because {segment.cause}" if segment.cause else segment.reason
            yield (segment.plan, budget, *(f"{count:,}" for count in counts), *rate_cells, rival_text, reason)
        first_token += segment.tokens


def _speed_note(explanation: Explanation) -> str:
    remarks = [
        f"Prompt {counted(explanation.prompt_tokens, 'token')}, new {explanation.new_tokens:,}, "
        f"mode {explanation.mode}: {explanation.tokens_per_second:.1f} tokens/s"
    ]
    if explanation.predicted:
        remarks.append(f"the plans predicted {explanation.predicted:.1f}")
    if explanation.plain and explanation.mode != "ar":
        remarks.append(f"plain decoding would give about {explanation.plain:.1f}")
    if explanation.draft_reading:
        remarks.append(reading_note(explanation.draft_reading))
    return "; ".join(remarks) + "."

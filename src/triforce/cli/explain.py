"""`triforce explain`: why a generation was as fast as it was."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from textwrap import fill

from triforce.cli.asked_prompt import asked_of
from triforce.cli.counts import counted
from triforce.cli.engine_arguments import load, sampling
from triforce.cli.progress import Prefill, Tokenization
from triforce.eval.tables import Table, percent
from triforce.interface.explain import Explanation, PlanReport, TierBelief

LINES = 24  # of a timeline that are printed: its beginning and its end


def run(options: Namespace) -> int:
    """Generate as `generate` does, and print statistics instead of the text."""
    given = sampling(options)
    asked = asked_of(options)
    asked.tell(options)
    options.model = asked.model
    prompt = asked.prompt
    llm = load(options)
    params = llm.sampling_params(**given)
    with Tokenization():
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
    advice = [f"{line}." for line in explanation.advice] or ["nothing that was measured says what would be faster."]
    print(*(fill(f"- {line}", 100, subsequent_indent="  ") for line in advice), sep="\n")
    return 0


def tables(explanation: Explanation) -> Iterator[Table]:
    """Return tables: each tier's work, and the plans by time."""
    parts = [
        (
            part.name,
            f"{part.passes:,}",
            f"{part.milliseconds:.2f}",
            percent(part.time),
            f"{part.proposed:,}",
            percent(part.acceptance),
            "all" if part.visible_tokens is None else f"{part.visible_tokens:,}",
        )
        for part in explanation.tiers
    ]
    yield Table(
        "Tiers", _speed(explanation), ("tier", "passes", "ms each", "time", "proposed", "accepted", "visible"), parts
    )
    if explanation.timeline:
        yield Table("Plans", "Tokens/s are of the first text.", _PLANS, list(_timeline(explanation)))

    if explanation.report:
        yield Table("Weighed", _best(explanation.report), _WEIGHED, list(_weighed(explanation.report)))
        yield Table("Beliefs", _COSTS, _BELIEFS, [_belief(tier) for tier in explanation.report.tiers])


_COSTS = "Milliseconds of passes over 1 and 8 tokens. Acceptance of n-grams: the part of what hindsight says."
_WEIGHED = ("plan", "tokens/s", "with hope", "remark")
_BELIEFS = ("tier", "ms of 1", "ms of 8", "passes", "acceptance", "of tokens")
_PLANS = (
    "plan", "budget", "from token", "proposals", "tokens", "tokens/s", "predicted", "with hope", "next best", "reason",
)  # fmt: skip


def _belief(tier: TierBelief) -> tuple[str, ...]:
    """A tier's costs by tokens of a pass, its acceptance, and how much was seen of each."""
    accepted = "" if tier.acceptance is None else f"{tier.acceptance:.2f} ± {tier.deviation:.2f}"
    narrow, wide = tier.milliseconds
    return (tier.name, f"{narrow:.2f}", f"{wide:.2f}", f"{tier.passes:.0f}", accepted, f"{tier.tokens:.0f}")


def _best(report: PlanReport) -> str:
    """The best plan by what was known when plans were weighed last, and what the account says."""
    best = max(report.weighed, key=lambda each: each.rate)
    plain = report.weighed[0]
    return (
        f"By what was known when plans were weighed last, {best.plan} would make {best.rate:.1f} tokens/s, plain "
        f"decoding {plain.rate:.1f}; speculation won {report.won:.2f} s, may risk {max(0.0, report.headroom):.3f} s."
    )


def _weighed(report: PlanReport) -> Iterator[tuple[str, ...]]:
    """The best plan of each choice of tiers, the one that is chosen first."""
    for each in sorted(report.weighed, key=lambda each: -each.score):
        score = f"{each.score:.0f}" if each.score else ""
        yield each.plan, f"{each.rate:.0f}", score, "" if each.score else "risks more than may be lost"


def _timeline(explanation: Explanation) -> Iterator[tuple[str, ...]]:
    """Plans from the lowest tier up, each with how far it guesses; the middle of a long list is left out."""
    first = 0
    left_out = len(explanation.timeline) - LINES
    for i, stretch in enumerate(explanation.timeline):
        if left_out > 0 and i == LINES // 2:
            yield (f"({left_out} more)", *[""] * (len(_PLANS) - 1))
        if left_out <= 0 or not LINES // 2 <= i < LINES // 2 + left_out:
            rates = (stretch.tokens / stretch.seconds if stretch.seconds else 0.0, stretch.predicted, stretch.score)
            counts = (first, stretch.proposals, stretch.tokens)
            budget = f"{stretch.budget:,}" if stretch.budget else ""
            shown = (f"{x:.0f}" if x else "" for x in rates)
            rival = f"{stretch.rival_score:.0f} {stretch.rival}" if stretch.rival_score else stretch.rival
            reason = f"{stretch.reason}; weighed as {stretch.cause}" if stretch.cause else stretch.reason
            yield (stretch.plan, budget, *(f"{n:,}" for n in counts), *shown, rival, reason)
        first += stretch.tokens


def _speed(explanation: Explanation) -> str:
    remarks = [
        f"Prompt {counted(explanation.prompt_tokens, 'token')}, new {explanation.new_tokens:,}, "
        f"mode {explanation.mode}: {explanation.tokens_per_second:.1f} tokens/s"
    ]
    if explanation.predicted:
        remarks.append(f"predicted were {explanation.predicted:.1f}")
    if explanation.plain and explanation.mode != "ar":
        remarks.append(f"plain decoding would give about {explanation.plain:.1f}")
    return "; ".join(remarks) + "."

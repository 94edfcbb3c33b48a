"""Regret of mode auto: its rate over that of plain decoding, and over that of the best fixed plan in hindsight."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.helpers.planning.simulation import NOISE, Simulation, keys_of
from tests.helpers.planning.traces import Played, Trace, fixed_plans, played, traces
from tests.helpers.planning.worlds import World
from triforce.planner import CostModel, Plan
from triforce.planner.cost_model import FILE_PASSES

LENGTHS = 64, 256, 1024  # tokens of a text
TUNED = "anthony-", "abraham-", "aio-libs"
"""Texts for tuning `PlannerConfig`. The others test it."""
WARMING = "anthony-", 200  # an earlier text of the process, and its tokens
PAYS = 1.3  # speedup over plain decoding from which speculation pays on a text


@dataclass(frozen=True)
class Cell:
    """Mode auto on one text of one length: its rate relative to plain decoding, and to the best fixed plan."""

    world: str
    trace: str
    length: int
    plain: float
    best: float
    plan: Plan

    @property
    def pays(self) -> bool:
        """Whether the best fixed plan is clearly faster than plain decoding."""
        return self.plain / self.best >= PAYS


def judging() -> list[Trace]:
    """Return the traces that were not used for tuning."""
    return [trace for trace in traces().values() if not trace.name.endswith(TUNED)]


def cells(world: World, played_traces: Iterable[Trace], lengths: Sequence[int] = LENGTHS) -> Iterator[Cell]:
    """Yield mode auto's cells on each trace that suits a world, for texts of each length one after another."""
    for trace in played_traces:
        if world.suits(trace):
            costs = warmed(trace, world)
            for length in lengths:
                plain, best, plan = best_fixed(trace, world, length)
                rate = Simulation(trace, world, costs).rate(length)
                yield Cell(world.name, trace.name, length, rate / plain, rate / best, plan)


def warmed(trace: Trace, world: World) -> CostModel:
    """Return the costs of a process with a profile and an earlier similar text; empty costs if the world is cold."""
    costs = profile(trace, world)
    who, tokens = WARMING
    for earlier_trace in traces().values() if world.known_seconds else ():
        same_setting = (earlier_trace.model, earlier_trace.prompt, earlier_trace.temperature) == (
            trace.model,
            trace.prompt,
            trace.temperature,
        )
        if (
            same_setting
            and earlier_trace.name.endswith(who)
            and "books" in earlier_trace.name
            and earlier_trace != trace
        ):
            Simulation(earlier_trace, world, costs, seed=1).rate(tokens)
    return costs


def profile(trace: Trace, world: World) -> CostModel:
    """Return the costs of a profile whose passes took the world's `known_seconds`."""
    costs = CostModel(level=world.level)
    generator = random.Random(1)
    tiers = ["full", "retrieval", "ngram", *(["draft"] if world.draft else [])]
    for length in (world.keys * trace.prompt, 600) if world.known_seconds else ():
        for width, tier in ((width, tier) for width in 30 // len(world.widths) * world.widths for tier in tiers):
            keys = keys_of(tier, [length] * world.rows, 1.0)
            seconds = world.known_seconds(tier, width, world.rows, keys) if world.known_seconds else 0.0
            costs.passes.observe(tier, width, world.rows, keys, seconds * generator.lognormvariate(0, NOISE))
    for tier in costs.passes.tiers.values():
        for pass_stats in tier.stats.values():
            pass_stats.count = min(pass_stats.count, FILE_PASSES)
            pass_stats.measured_here = False
        tier.invalidate(refit=True)
    return costs


def best_fixed(trace: Trace, world: World, length: int) -> tuple[float, float, Plan]:
    """Return tokens per second of plain decoding and of the best fixed plan in hindsight, and that plan."""
    prompt = world.keys * trace.prompt
    budgets = [(), ((prompt.bit_length(), 2.0),)] if prompt > 9000 else [()]
    plans = [Plan(), *fixed_plans(world.draft, prompt > 2048, budgets)]
    rates = [fixed_rate(trace, world, plan, length) for plan in plans]
    return rates[0], max(rates), plans[rates.index(max(rates))]


def fixed_rate(trace: Trace, world: World, plan: Plan, length: int) -> float:
    """Return tokens per second of a fixed plan in a world, up to a length."""
    stops = tuple(sorted({*world.busy, *LENGTHS} - {0}))
    tokens = 0
    seconds = 0.0
    start = 0
    for stop, part in zip(stops, played(trace.name, plan, world.rows, stops), strict=True):
        tokens += part.tokens
        seconds += world.speed(start) * _seconds(trace, world, plan, part, (start + stop) // 2)
        start = stop
        if stop == length:
            break
    return tokens / (seconds * world.outlier_factor)


def _seconds(trace: Trace, world: World, plan: Plan, part: Played, position: int) -> float:
    length = world.keys * trace.prompt + position
    times = plan.budget_factors[0][1] if plan.budget_factors else 1.0
    return sum(
        count * world.seconds(tier, width, rows, keys_of(tier, [length] * rows, times))
        for (tier, width, rows), count in part.passes.items()
    )

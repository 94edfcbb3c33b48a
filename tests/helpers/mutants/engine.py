"""Faults of the engine: rows that come, go, are swapped out and in; and planners of ranks that do not agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.helpers.mutants.mutation import Edit, Mutant, Swap

BATCH = "triforce.engine.sequence_batch:SequenceBatch"
FULL = "triforce.kvcache.views.full:FullView"
RETRIEVAL = "triforce.kvcache.views.retrieval:RetrievalView"
STREAMING = "triforce.kvcache.views.streaming:StreamingView"
POOL = "triforce.kvcache.pool:PagePool"
COUNTERS = "triforce.speculation.draft:Counters"
ROWS: dict[str, tuple[str, tuple[str, str]]] = {
    "draws of a row start anew": (f"{BATCH}._make_sampler", ("if draws is not None:", "if False:")),
    "streaming rows by place": (f"{STREAMING}.select", ("[values[b] for b in rows]", "values[: len(rows)]")),
    "streaming rows join empty": (f"{STREAMING}.join", ("other.lengths_B))", "0 * other.lengths_B))")),
    "retrieval selections by place": (
        f"{RETRIEVAL}.select", ("[self.selections[b] for b in rows]", "self.selections[: len(rows)]"),
    ),
    "attention observations by place": (
        f"{FULL}.select", ("[self.observations[b] for b in rows]", "self.observations[: len(rows)]"),
    ),
    "lengths of the pool by place": (f"{POOL}.select", ("self.lengths_B[list(rows)]", "self.lengths_B[: len(rows)]")),
    "shared pages freed": ("triforce.kvcache.pool:PageAllocator.decref", (" if not self.refcounts[page]", "")),
    "counters by place": (f"{COUNTERS}.select", ("[list(rows)]", "[: len(rows)]")),
    "draws lost in swapping": (f"{BATCH}.swap_in", ("= row.draws", "= 0")),
    "new tokens lost in swapping": (
        f"{BATCH}.swap_in", ("+ sequence.tokens", "+ sequence.prompt[: len(sequence.tokens)]"),
    ),
    "another row's observation swapped in": (
        f"{FULL}.swap_in", ("= swapped.observation", "= self.observations[0]"),
    ),
    "selection lost in swapping": (f"{RETRIEVAL}.swap_out", ("row.pages and replace", "False and replace")),
    "selection swapped in to old pages": (
        f"{RETRIEVAL}.swap_in", (
            "self.row_units(b)[swapped.pages.units]",
            "self.full.pool.xp.astype(swapped.pages.units, self.full.pool.xp.int32)",
        ),
    ),
    "streaming window lost in swapping": (
        f"{STREAMING}.swap_in", ("self.oldest_tokens[b] = ring", "self.oldest_tokens[b] = ring[0], 0, 0, self.sinks"),
    ),
    "counters lost in swapping": (f"{COUNTERS}.swap_in", ("= count", "= 0")),
}  # fmt: skip


def disobeying(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A mirror whose second rank applies changed commands."""

    def make(apply: Any) -> Any:
        def disobey(mirror: Any, commands: Any) -> list[Any]:
            return list(apply(mirror, change(commands) if mirror.llm.ranks.rank else commands))

        return disobey

    return make


def steered_alone(steer: Any) -> Any:
    from triforce.distributed.group import ALONE

    def deaf(controller: Any, *arguments: Any) -> Any:
        controller.ranks = ALONE
        return steer(controller, *arguments)

    return deaf


MIRROR = "triforce.server.engine_thread:TPMirror.apply"
MUTANTS = [
    *(
        Mutant(name, "tests/engine/test_engine_mutants.py::test_engine_mutant_is_noticed", (Edit(target, change),))
        for name, (target, change) in ROWS.items()
    ),
    Mutant(
        "a rank is not told who has gone",
        "tests/distributed/test_tensor_parallel_faults.py::test_rank_mutant_is_noticed",
        (Swap(MIRROR, disobeying(lambda commands: type(commands)([], commands.new))),),
    ),
    Mutant(
        "a rank begins requests in another order",
        "tests/distributed/test_tensor_parallel_faults.py::test_rank_mutant_is_noticed",
        (Swap(MIRROR, disobeying(lambda commands: type(commands)(commands.cancelled, commands.new[::-1]))),),
    ),
    Mutant(
        "planners of ranks decide alone",
        "tests/distributed/test_tensor_parallel_texts.py::test_planner_mutant_is_noticed",
        (Swap("triforce.planner.controller:PlanController.steer", steered_alone),),
    ),
]

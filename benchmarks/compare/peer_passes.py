"""Prompts and passes of other engines on a GGUF file, for `triforce bench kernels --model`, each in its own process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.compare.build import lacking
from benchmarks.compare.engines import ON_FILE, USUAL, Load, loads
from benchmarks.compare.processes import EngineTrouble, Launcher, packages
from benchmarks.compare.worker_pool import Models, WorkerPool
from triforce.backends import dispatch
from triforce.bench.model_passes import WARM_TOKENS, Announce, PassPlan, Row, prompt_row

ENGINES = ("ikllamacpp", "llamacpp")
PASSES = 12
"""Passes of a width, of which the median counts."""
TIMEOUT = 1800.0
"""Seconds for a prompt, or for the passes of a width."""
READ = ""
"""The way of a load that reads a prompt; the others are widths."""


def rows(
    file: Path, plan: PassPlan, engines: Sequence[str], pythons: Mapping[str, str], announce: Announce
) -> Iterator[Row]:
    """Yield rows of each engine and setting; one that is missing or fails has a row that says so."""
    with TemporaryDirectory() as work, packages() as path:
        launcher = Launcher(pythons, dispatch.usable_cpus(), TIMEOUT, Path(work), path)
        for engine in engines:
            title, module, needs, *_ = ON_FILE[engine]
            try:
                launcher.require(engine, module, needs)
            except EngineTrouble as trouble:
                yield {"engine": title, **trouble.row}
                continue
            noted = {""}
            for load in _pass_loads(engine, plan.widths):
                row_head = {"engine": title, "variant": load.name}
                with WorkerPool(launcher, Models(file, file, None), len(plan.ids) + max(plan.widths)) as pool:
                    try:
                        note = _note(pool, engine, load, plan)
                        if note not in noted:
                            noted.add(note)
                            yield {"engine": title, "note": note}
                        for row in _load_rows(pool, engine, load, plan, announce):
                            yield row_head | row
                    except EngineTrouble as trouble:
                        yield row_head | trouble.row


def _pass_loads(engine: str, widths: Sequence[int]) -> list[Load]:
    """Return the loads of an engine that round no KV, cut prompts as usual and order weights, if they can.

    Widths are their ways.
    """
    ways = {READ: {}, **{str(width): {"width": width} for width in widths}}
    usual = {"kv": None, "repack": True, **USUAL}
    return [
        Load(load.name, load.settings, ways)
        for load in loads(engine, 16)
        if all(load.settings.get(name, value) == value for name, value in usual.items())
    ]


def _note(pool: WorkerPool, engine: str, load: Load, plan: PassPlan) -> str:
    """Return what its build lacks, told by a short first reading; "" if it lacks nothing. Raises EngineTrouble."""
    built: str = pool.ask(engine, load, READ, plan.ids[:WARM_TOKENS], 1)["built"]
    return lacking(built, dispatch.native.level(), ON_FILE[engine].package) if dispatch.native else ""


def _load_rows(pool: WorkerPool, engine: str, load: Load, plan: PassPlan, announce: Announce) -> Iterator[Row]:
    """Yield rows of one setting. Raises EngineTrouble."""
    name = f"{ON_FILE[engine].title}, {load.name}"
    for length in plan.prompts:
        announce(f"{name}: a prompt of {length:,} tokens")
        yield prompt_row(length, partial(_read, pool, engine, load, plan.ids[:length]))
    for context in plan.contexts:
        announce(f"{name}: passes after {context:,} tokens")
        for width in plan.widths:
            result = pool.ask(engine, load, str(width), plan.ids[:context], PASSES + 1, fresh=False)
            figures = {"seconds": result["pass_seconds"], "busy_cores": result["busy_cores"]}
            yield {"kernel": "pass", "context": context, "width": width, **figures}


def _read(pool: WorkerPool, engine: str, load: Load, ids: list[int]) -> float:
    seconds: float = pool.ask(engine, load, READ, ids, 1)["prefill_seconds"]
    return seconds

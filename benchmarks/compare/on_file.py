"""Engines on a GGUF file: for each context the best settings of each, and then all of these in turns, beside ours.

A row says `what` it is: an engine that is `absent`, a `note`, a `text` that was chosen, a `setting` that was tried, the
`prefill` or the `decoding` of the best ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.compare.build import lacking
from benchmarks.compare.engines import ON_FILE, OURS, Load, Settings, loads
from benchmarks.compare.hf_folder import unpacked
from benchmarks.compare.processes import EngineTrouble, Launcher, packages
from benchmarks.compare.texts import Writer, choose
from benchmarks.compare.worker_pool import DECODING, Contender, Models, Taken, WorkerPool, best, in_turns
from triforce.bench.prompts import Sources
from triforce.errors import ModelError
from triforce.interface.repeated_grams import repeated_share
from triforce.ragged import common_prefix

Row = dict[str, Any]
PLAIN = "ar"
TRIAL = 48
"""New tokens of the texts by which settings are chosen."""

LONG = 60.0
"""Seconds of reading a prompt, by all, after which it is not read once more."""


@dataclass(frozen=True)
class FileConfig:
    """Engines, ours and others, and texts. `bits`: of a weight, in the mean; `modes`: ours; `level`: of our kernels."""

    file: Path
    draft: str | Path | None
    bits: float
    engines: Sequence[str]
    modes: Sequence[str]
    contexts: Sequence[int]
    workloads: Sequence[str]
    temperatures: Sequence[float]
    tokens: int
    repeats: int
    level: str

    @property
    def ours(self) -> list[Contender]:
        """Our modes, plain decoding first: in a process without the draft, whose states it would note."""
        modes = [mode for mode in dict.fromkeys(self.modes) if mode != PLAIN]
        plain = Load("", {"draft": None} if self.draft else {}, {PLAIN: {"mode": PLAIN}})
        load = Load("", {}, {mode: {"mode": mode} for mode in modes})
        return [Contender(OURS, PLAIN, plain, PLAIN), *(Contender(OURS, mode, load, mode) for mode in modes)]


def rows(sources: Sources, plan: FileConfig, start: dict[str, Any]) -> Iterator[Row]:
    """Yield rows as they are measured. `start`: how engines are started (see `Launcher`). Raises RequestError."""
    with packages() as path:
        launcher = Launcher(path=path, **start)
        models = Models(plan.file, launcher.work / "folder", plan.draft)
        present = []
        noted = set[str]()
        for engine in plan.engines:
            try:
                _prepare(engine, launcher, models)
                present.append(engine)
            except EngineTrouble as trouble:
                yield {"what": "absent", "engine": engine, **trouble.row}
        for context in plan.contexts:
            room = context + plan.tokens
            with WorkerPool(launcher, models, room) as pool:
                texts = choose(sources, plan.workloads, context, _writers(pool, present, plan))
            for workload, text in texts.items():
                row_head = {"what": "text", "context": context, "workload": workload, "place": text.place}
                yield row_head | {"repeated_8_grams": text.repeats}
            prompts = {workload: text.ids for workload, text in texts.items()}
            ids = prompts[plan.workloads[0]]
            chosen = list(plan.ours)
            for engine in present:
                setting_rows = []
                for row in _settings(engine, launcher, models, ids, plan):
                    setting_rows.append(row)
                    if row.get("note") not in noted:
                        yield {name: value for name, value in row.items() if name != "load"}
                        noted |= {row["note"]} if "note" in row else set()
                chosen += best(setting_rows)
            with WorkerPool(launcher, models, room) as pool:
                for row in chain(_prefill(pool, chosen, ids), _decoding(pool, chosen, prompts, plan)):
                    yield row | {"context": context}


def _prepare(engine: str, launcher: Launcher, models: Models) -> None:
    """Raise EngineTrouble if an engine is not there, or cannot be given the model."""
    engine_spec = ON_FILE[engine]
    launcher.require(engine, engine_spec.module, engine_spec.needs)
    if engine_spec.folder:
        try:
            unpacked(models.file, models.folder)
        except ModelError as error:
            raise EngineTrouble(failed=str(error)) from error


def _writers(pool: WorkerPool, engines: Sequence[str], plan: FileConfig) -> dict[str, Writer]:
    """Return what makes the greedy text of a prompt, by engine: ours first, as it is the one that must be there."""

    def writer(engine: str, load: Load, way: str) -> Writer:
        return lambda ids: list(pool.ask(engine, load, way, ids, plan.tokens, fresh=False)["ids"])

    first_loads = {engine: loads(engine, plan.bits)[0] for engine in engines}
    ours = plan.ours[0]
    writers = {engine: writer(engine, load, next(iter(load.ways))) for engine, load in first_loads.items()}
    return {OURS: writer(OURS, ours.load, ours.way), **writers}


def _settings(engine: str, launcher: Launcher, models: Models, ids: list[int], plan: FileConfig) -> Iterator[Row]:
    """Yield a row for reading the prompt with each setting of an engine, and one for each way to make texts then."""
    for load in loads(engine, plan.bits, models.draft_of(engine) is not None):
        with WorkerPool(launcher, models, len(ids) + plan.tokens) as pool:
            for row in _setting(engine, load, pool, ids, plan):
                yield {"what": "setting", "context": len(ids), "engine": engine, "load": load} | row


def _setting(engine: str, load: Load, pool: WorkerPool, ids: list[int], plan: FileConfig) -> Iterator[Row]:
    first_way, *_ = load.ways
    row_head = {"kind": "prefill", "way": first_way, "variant": load.name}
    try:
        read = pool.ask(engine, load, first_way, ids, 1)
    except EngineTrouble as trouble:
        yield row_head | trouble.row
        return
    yield row_head | {"prefill_tokens_per_second": read["prefill_tokens_per_second"]}
    if lacks := lacking(read.get("built", ""), plan.level, ON_FILE[engine].package):
        yield {"what": "note", "kind": "note", "note": lacks}
    ways = [Contender(engine, _kind(load.ways[way]), load, way) for way in load.ways]
    tokens = min(TRIAL, plan.tokens)
    tried = in_turns(ways, 2, lambda contender, _: pool.ask(engine, load, contender.way, ids, tokens, fresh=False))
    for contender, taken in tried.items():
        rates = [float(turn["tokens_per_second"]) for turn in taken.turns]
        speed_row = {"tokens_per_second": max(rates)} if rates else {}
        yield {"kind": contender.kind, "way": contender.way, "variant": contender.variant, **speed_row, **taken.trouble}


def _kind(way: Settings) -> str:
    return next((kind for kind in DECODING if kind in way), DECODING[0])


def _prefill(pool: WorkerPool, chosen: Sequence[Contender], ids: list[int]) -> Iterator[Row]:
    """Yield a row for each engine's reading of the prompt: twice, unless that takes long."""
    reading = [contender for contender in chosen if contender.kind in ("prefill", PLAIN)]
    began = perf_counter()
    taken = in_turns(
        reading,
        2,
        lambda contender, _: pool.ask(contender.engine, contender.load, contender.way, ids, 1),
        lambda: perf_counter() - began < LONG,
    )
    for contender, mine in taken.items():
        yield _row("prefill", contender, mine, "prefill_")


def _decoding(
    pool: WorkerPool, chosen: Sequence[Contender], texts: dict[str, list[int]], plan: FileConfig
) -> Iterator[Row]:
    """Yield a row for each text, temperature and contender; what prompts take is no part of it."""
    making = [contender for contender in chosen if contender.kind != "prefill"]
    for workload, ids in texts.items():
        for temperature in plan.temperatures:

            def ask(contender: Contender, turn: int, ids: list[int] = ids, temperature: float = temperature) -> Row:
                turn_options = {"temperature": temperature, "seed": 1 + turn, "fresh": False}
                return pool.ask(contender.engine, contender.load, contender.way, ids, plan.tokens, **turn_options)

            taken = in_turns(making, plan.repeats, ask)
            plain = next((mine.turns for contender, mine in taken.items() if contender.kind == PLAIN), [])
            for contender, mine in taken.items():
                row = _row("decoding", contender, mine, "")
                yield row | {"workload": workload, "temperature": temperature, **_same(mine, plain, ids)}


def _row(what: str, contender: Contender, mine: Taken, part: str) -> Row:
    rates = [float(turn[f"{part}tokens_per_second"]) for turn in mine.turns]
    row_head = {
        "what": what,
        "engine": contender.engine,
        "kind": contender.kind,
        "variant": contender.variant,
        **mine.trouble,
    }
    if not rates:
        return row_head
    busy = median(turn[f"{part}busy_cores"] for turn in mine.turns)
    return row_head | {
        "turns": rates, "tokens_per_second": median(rates), "busy_cores": busy, "version": mine.turns[0]["version"]
    }  # fmt: skip


def _same(mine: Taken, plain: Sequence[Row], ids: list[int]) -> Row:
    """Return how far texts are those of plain decoding, and how much repeats in them, in the mean of the turns."""
    token_ids = [turn["ids"] for turn in mine.turns]
    pairs = list(zip(token_ids, (turn["ids"] for turn in plain), strict=False))
    return {
        "as_plain": sum(common_prefix(a, b) / len(a) for a, b in pairs) / len(pairs) if pairs else None,
        "repeated_8_grams": sum(repeated_share(text, ids) for text in token_ids) / len(token_ids)
        if token_ids
        else None,
    }

"""Engines on a folder, and their rows on prompts: the same token ids, greedy, as many new tokens, prefill apart.

Then what they come to, and tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.compare.engines import ENGINES, INT8_KV, OURS, PLAIN, PLAIN_INT8_KV, Variant
from benchmarks.compare.processes import EngineTrouble, Launcher, packages, speeds, task_of, turn_of
from triforce.interface.repeated_grams import repeated_share
from triforce.ragged import common_prefix
from triforce.tables import Table, percent, tokens

Row = dict[str, Any]
LONG = 60.0
"""Seconds after which there is no further try, if one counts."""


@dataclass(frozen=True)
class CompareConfig:
    """`pythons`: interpreters by engine; `timeout` in seconds for each run; `tries` at most, of each setting."""

    model: Path
    draft: Path | None
    engines: Sequence[str]
    tokens: int
    threads: int
    timeout: float
    pythons: Mapping[str, str]
    work: Path
    tries: int = 3


def rows(prompts: Mapping[int, list[int]], plan: CompareConfig) -> Iterator[Row]:
    """A row for each engine, setting and prompt (by its context); one for an engine that is not there."""
    with packages() as path:
        launcher = Launcher(plan.pythons, plan.threads, plan.timeout, plan.work, path)
        for context, ids in prompts.items():
            plain = None
            for engine in plan.engines:
                for variant in ENGINES[engine].all if plan.draft else ENGINES[engine].variants:
                    row = _row(engine, variant, ids, plan, launcher)
                    plain = row.get("ids") if (engine, variant.name) == PLAIN else plain
                    token_ids = row.pop("ids", None)
                    as_plain = common_prefix(token_ids, plain) / len(token_ids) if token_ids and plain else None
                    again = repeated_share(token_ids) if token_ids else None
                    row_tail = {"as_plain": as_plain, "repeated_8_grams": again}
                    yield {"engine": engine, "variant": variant.name, "context": context, **row, **row_tail}
                    if "missing" in row:
                        break


def _row(engine: str, variant: Variant, ids: list[int], plan: CompareConfig, launcher: Launcher) -> Row:
    """The median of a few tries that were busy enough, or the busiest; one does that takes long."""
    tried: list[Row] = []
    began = perf_counter()
    while len(tried) < plan.tries and not (perf_counter() - began > LONG and any(row["accepted"] for row in tried)):
        measured_row = _run(engine, variant, ids, plan, launcher)
        if "busy_cores" not in measured_row:
            return measured_row
        tried.append(measured_row)
    counted = sorted((row for row in tried if row["accepted"]), key=lambda row: float(row["tokens_per_second"]))
    median = counted[len(counted) // 2] if counted else max(tried, key=lambda row: float(row["busy_cores"]))
    return median | {"tries": len(tried)}


def _run(engine: str, variant: Variant, ids: list[int], plan: CompareConfig, launcher: Launcher) -> Row:
    task = task_of(plan.model, plan.draft, len(ids) + plan.tokens, variant.load)
    try:
        with launcher.running(engine, ENGINES[engine].needs, task) as worker:
            result = worker.ask(turn_of(ids, plan.tokens, variant.text))
    except EngineTrouble as trouble:
        return trouble.row
    return speeds(result, len(ids), plan.threads)


def line(row: Row) -> str:
    """A row for people, as soon as it is measured."""
    name = f"{row['context']:>8,} {row['engine']:<12} {row['variant']:<18}"
    if trouble := row.get("missing") or row.get("failed"):
        return f"{name} {trouble}"
    busy = f"{row['busy_cores']:.2f} cores" + ("" if row["accepted"] else ", rejected")
    return f"{name} {row['tokens_per_second']:8.1f} tokens/s, prefill {row['prefill_seconds']:6.1f} s, {busy}"


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return by context the fastest accepted setting of each engine, and our tokens/s over the best of the others.

    `decode` is of our best mode, `plain` of our plain decoding, `plain_int8_kv` of that with int8 KV, which counts
    nowhere else; `prefill` of tokens/s of prefill; None where there is nothing to compare with.
    """
    summaries = []
    for context in sorted({row["context"] for row in rows}):
        counted = [row for row in rows if row["context"] == context and row.get("accepted")]
        ours, theirs = ([row for row in counted if (row["engine"] == OURS) == mine] for mine in (True, False))
        plain, coded = (
            [row for row in ours if (OURS, row["variant"]) == variant] for variant in (PLAIN, PLAIN_INT8_KV)
        )
        ours = [row for row in ours if not row["variant"].endswith(INT8_KV)]
        best = {name: _most([r for r in ours + theirs if r["engine"] == name], "tokens_per_second") for name in ENGINES}
        summaries.append({
            "context": context, "best": {name: engine_rate for name, engine_rate in best.items() if engine_rate},
            "decode": _ratio(ours, theirs, "tokens_per_second"), "plain": _ratio(plain, theirs, "tokens_per_second"),
            "plain_int8_kv": _ratio(coded, theirs, "tokens_per_second"),
            "prefill": _ratio(ours, theirs, "prefill_tokens_per_second"),
        })  # fmt: skip
    return summaries


def _ratio(ours: Sequence[Row], rival_rows: Sequence[Row], name: str) -> float | None:
    mine = _most(ours, name)
    theirs = _most(rival_rows, name)
    return mine / theirs if mine and theirs else None


def _most(rows: Sequence[Row], name: str) -> float | None:
    return max((float(row[name]) for row in rows), default=None)


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table for each context, and what is missing."""
    context_tables = [_table(context, rows) for context in sorted({row["context"] for row in rows})]
    absent = {(row["engine"], row["variant"]): row.get("missing") or row.get("failed") for row in rows}
    lines = [[f"{ENGINES[engine].title}, {variant}", why] for (engine, variant), why in absent.items() if why]
    note = "An engine without an extra is left out; one that failed says why."
    return [*context_tables, *([Table("Not compared", note, ["engine", "why"], lines)] if lines else [])]


def _table(context: int, all_rows: Sequence[Row]) -> Table:
    rows = [row for row in all_rows if row["context"] == context and "tokens_per_second" in row]
    plain = next((row for row in rows if (row["engine"], row["variant"]) == PLAIN), None)
    lines = []
    for row in rows:
        ratio = f"{row['tokens_per_second'] / plain['tokens_per_second']:.2f}" if plain else "-"
        name = f"{ENGINES[row['engine']].title} {row['version']}, {row['variant']}"
        busy = f"{row['busy_cores']:.2f}" + ("" if row["accepted"] else ", rejected")
        lines.append([
            name, f"{row['prefill_seconds']:.1f}", f"{row['tokens_per_second']:.1f}", ratio, busy,
            percent(row["as_plain"]) or "-", percent(row["repeated_8_grams"]),
        ])  # fmt: skip
    note = (
        "Greedy; seconds to the first token, then tokens/s of the others, and these over our plain decoding's; medians "
        "of three runs, or one of a minute. Rows with too few busy cores (1.7 of 2) are rejected. As plain: the share "
        "of tokens before the first that differs from our plain decoding's; other engines round otherwise, so theirs "
        "may part anywhere. Repeats: the share of 8-grams that the text had before, which lookup lives on."
    )
    header = ["engine", "prefill, s", "tokens/s", "of plain", "busy cores", "as plain", "repeats"]
    return Table(f"Decoding after {tokens(context)} tokens", note, header, lines)

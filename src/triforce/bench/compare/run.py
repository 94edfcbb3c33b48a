"""Rows of engines on prompts: the same token ids, greedy, the same number of new tokens, prefill apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from triforce.bench.compare.engines import ENGINES, OURS
from triforce.bench.quality import alike
from triforce.evaluate import Table
from triforce.evaluate.report import percent, tokens

Row = dict[str, Any]
BUSY = 0.85
"""Of the cores, at least so many must have been busy, 1.7 of 2: else something else was in the way, or idle."""

PLAIN = (OURS, "ar")


@dataclass(frozen=True)
class Plan:
    """`pythons`: interpreters by engine; `timeout` in seconds for each run; `tries` while too few cores are busy."""

    model: Path
    draft: Path | None
    engines: Sequence[str]
    tokens: int
    threads: int
    timeout: float
    pythons: Mapping[str, str]
    work: Path
    tries: int = 3


def rows(prompts: Mapping[int, list[int]], plan: Plan) -> Iterator[Row]:
    """A row for each engine, setting and prompt (by its context); one for an engine that is not there."""
    with _package() as path:
        for context, ids in prompts.items():
            plain = None
            for engine in plan.engines:
                for variant in ENGINES[engine].all if plan.draft else ENGINES[engine].variants:
                    row = _row(engine, variant, ids, plan, path)
                    plain = row.get("ids") if (engine, variant) == PLAIN else plain
                    made = row.pop("ids", None)
                    as_plain = alike(made, plain) if made and plain else None
                    yield {"engine": engine, "variant": variant, "context": context, **row, "as_plain": as_plain}
                    if "missing" in row:
                        break


def _row(engine: str, variant: str, ids: list[int], plan: Plan, path: str) -> Row:
    """The busiest of a few tries, or the first that is busy enough."""
    tried: list[Row] = []
    for _ in range(plan.tries):
        found = _run(engine, variant, ids, plan, path)
        if "busy_cores" not in found:
            return found
        tried.append(found)
        if found["accepted"]:
            break
    return max(tried, key=lambda row: float(row["busy_cores"])) | {"tries": len(tried)}


def _run(engine: str, variant: str, ids: list[int], plan: Plan, path: str) -> Row:
    task: Row = {
        "model": str(plan.model),
        "draft": str(plan.draft) if plan.draft else None,
        "ids": ids,
        "variant": variant,
    }
    task |= {"tokens": plan.tokens, "threads": plan.threads, "work": str(plan.work)}
    python = plan.pythons.get(engine, sys.executable)
    environment = os.environ | {"OMP_NUM_THREADS": str(plan.threads)}
    if python != sys.executable:
        environment["PYTHONPATH"] = path
    command = [python, "-m", f"triforce.bench.compare.with_{engine}"]
    try:
        done = subprocess.run(
            command, input=json.dumps(task), capture_output=True, text=True, timeout=plan.timeout, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no end after {plan.timeout:.0f} s"}
    except OSError as error:
        return {"failed": f"{python} cannot be run ({error.strerror})"}
    if done.returncode:
        return _trouble(engine, done.stderr)
    return _speeds(json.loads(done.stdout.splitlines()[-1]), len(ids), plan.threads)


def _speeds(result: Row, context: int, threads: int) -> Row:
    decoded, seconds = result["decoded"], result["seconds"]
    return {
        "tokens": decoded,
        "seconds": seconds,
        "tokens_per_second": decoded / seconds if seconds else 0.0,
        "prefill_seconds": result["prefill_seconds"],
        "prefill_tokens_per_second": context / result["prefill_seconds"],
        "busy_cores": result["busy_cores"],
        "accepted": result["busy_cores"] >= BUSY * threads,
        "version": result["version"],
        "ids": result["ids"],
    }


def _trouble(engine: str, stderr: str) -> Row:
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "no message")
    needs = ENGINES[engine].needs
    if needs and ("ModuleNotFoundError" in last or "ImportError" in last):
        return {"missing": f"pip install 'triforce[{needs}]' (here, or where --python {engine}=... points); {last}"}
    return {"failed": last[:300]}


@contextmanager
def _package() -> Iterator[str]:
    """A folder with this package and nothing else: other interpreters must not find this one's packages."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "triforce").symlink_to(Path(__file__).parents[2], target_is_directory=True)
        yield folder


def tables(found: Sequence[Row]) -> list[Table]:
    """A table for each context, and what is missing."""
    made = [_table(context, found) for context in sorted({row["context"] for row in found})]
    absent = {(row["engine"], row["variant"]): row.get("missing") or row.get("failed") for row in found}
    lines = [[f"{ENGINES[engine].title}, {variant}", why] for (engine, variant), why in absent.items() if why]
    note = "An engine without an extra is left out; one that failed says why."
    return [*made, *([Table("Not compared", note, ["engine", "why"], lines)] if lines else [])]


def _table(context: int, found: Sequence[Row]) -> Table:
    rows = [row for row in found if row["context"] == context and "tokens_per_second" in row]
    plain = next((row for row in rows if (row["engine"], row["variant"]) == PLAIN), None)
    lines = []
    for row in rows:
        ratio = f"{row['tokens_per_second'] / plain['tokens_per_second']:.2f}" if plain else "-"
        name = f"{ENGINES[row['engine']].title} {row['version']}, {row['variant']}"
        busy = f"{row['busy_cores']:.2f}" + ("" if row["accepted"] else ", rejected")
        lines.append([
            name, f"{row['prefill_seconds']:.1f}", f"{row['tokens_per_second']:.1f}", ratio, busy,
            percent(row["as_plain"]) or "-",
        ])  # fmt: skip
    note = (
        "Greedy; seconds to the first token, then tokens/s of the others, and these over our plain decoding's. Rows "
        "with too few busy cores (1.7 of 2) are rejected. As plain: the share of tokens before the first that differs "
        "from our plain decoding's; other engines round otherwise, so theirs may part anywhere."
    )
    header = ["engine", "prefill, s", "tokens/s", "of plain", "busy cores", "as plain"]
    return Table(f"Decoding after {tokens(context)} tokens", note, header, lines)

"""`triforce bench compare`: other engines on the same checkpoint and prompts."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from triforce.bench.cells import WORKLOADS
from triforce.bench.compare.run import ENGINES, OURS, CompareConfig, rows, summary, tables
from triforce.bench.prompts import prompts
from triforce.cli.bench.report import about, show, write
from triforce.cli.bench.setup import load, make_folder, sources
from triforce.engine.inputs import known
from triforce.errors import RequestError
from triforce.llm import LLM


def run(options: Namespace) -> int:
    """Print rows as they are measured, tables, and a line of JSON; an engine may be missing. Raises RequestError."""
    engines = [known("engine", name, ENGINES) for name in options.engines or ENGINES]
    pythons = _pythons(options.python)
    if min(options.contexts) < 2 or options.tokens < 2 or options.timeout <= 0:
        raise RequestError("--contexts and --tokens must be at least 2, and --timeout above 0")
    llm = load(options)
    known("workload", options.workload, WORKLOADS)
    texts = sources(llm, options.texts)
    by_context = {context: prompts(texts, options.workload, context, 1)[0] for context in options.contexts}
    with TemporaryDirectory() as temporary:
        plan = _plan(llm, options, engines, pythons, Path(options.work or temporary))
        del llm  # its memory is for the others now
        found = []
        for row in rows(by_context, plan):
            found.append(row)
            print(line(row), flush=True)
            write(options.json, about() | {"threads": plan.threads, "summary": summary(found), "rows": found})
    show(tables(found))
    print(json.dumps(summary(found)))
    return 0


def line(row: dict[str, Any]) -> str:
    """A row for people, as soon as it is measured."""
    name = f"{row['context']:>8,} {row['engine']:<12} {row['variant']:<18}"
    if trouble := row.get("missing") or row.get("failed"):
        return f"{name} {trouble}"
    busy = f"{row['busy_cores']:.2f} cores" + ("" if row["accepted"] else ", rejected")
    return f"{name} {row['tokens_per_second']:8.1f} tokens/s, prefill {row['prefill_seconds']:6.1f} s, {busy}"


def _plan(llm: LLM, options: Namespace, engines: list[str], pythons: dict[str, str], work: Path) -> CompareConfig:
    make_folder("--work", work)
    draft = llm.draft.path if llm.draft else None
    threads = options.threads or len(os.sched_getaffinity(0))
    return CompareConfig(llm.target.path, draft, engines, options.tokens, threads, options.timeout, pythons, work)


def _pythons(given: list[str]) -> dict[str, str]:
    """Interpreters by engine; `all` is for those without one, but for triforce itself."""
    pairs = [text.partition("=") for text in given]
    if wrong := [name for name, _, path in pairs if not path]:
        raise RequestError(f"--python {wrong[0]}: give ENGINE=PATH")
    found = {known("engine", name, [*ENGINES, "all"]): path for name, _, path in pairs}
    others = found.pop("all", None)
    return {name: others for name in ENGINES if others and name != OURS} | found

"""`triforce bench compare`: other engines on the same checkpoint and prompts."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from triforce.cli.bench.report import about, show, write
from triforce.cli.bench.setup import load, sources
from triforce.errors import RequestError

if TYPE_CHECKING:
    from triforce.bench.compare.run import CompareConfig
    from triforce.llm import LLM


def run(options: Namespace) -> int:
    """Print rows as they are measured, tables, and a line of JSON; an engine may be missing. Raises RequestError."""
    from triforce.bench.compare.run import rows, summary, tables

    engines, pythons = _engines(options.engines), _pythons(options.python)
    if min(options.contexts) < 2 or options.tokens < 2 or options.timeout <= 0:
        raise RequestError("--contexts and --tokens must be at least 2, and --timeout above 0")
    llm = load(options)
    prompts = _prompts(llm, options)
    with TemporaryDirectory() as temporary:
        plan = _plan(llm, options, engines, pythons, Path(options.work or temporary))
        del llm  # its memory is for the others now
        found = []
        for row in rows(prompts, plan):
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
    from triforce.bench.compare.run import CompareConfig

    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"--work {work} cannot be made ({error.strerror}); name a folder") from error
    draft = llm.draft.path if llm.draft else None
    threads = options.threads or len(os.sched_getaffinity(0))
    return CompareConfig(llm.target.path, draft, engines, options.tokens, threads, options.timeout, pythons, work)


def _prompts(llm: LLM, options: Namespace) -> dict[int, list[int]]:
    from triforce.bench.cells import WORKLOADS
    from triforce.bench.prompts import prompts
    from triforce.engine.inputs import known

    known("workload", options.workload, WORKLOADS)
    texts = sources(llm, options.texts)
    return {context: prompts(texts, options.workload, context, 1)[0] for context in options.contexts}


def _engines(asked: list[str] | None) -> list[str]:
    from triforce.bench.compare.run import ENGINES
    from triforce.engine.inputs import known

    return [known("engine", name, ENGINES) for name in asked or ENGINES]


def _pythons(given: list[str]) -> dict[str, str]:
    """Interpreters by engine; `all` is for those without one, but for triforce itself."""
    from triforce.bench.compare.run import ENGINES, OURS
    from triforce.engine.inputs import known

    pairs = [text.partition("=") for text in given]
    if wrong := [name for name, _, path in pairs if not path]:
        raise RequestError(f"--python {wrong[0]}: give ENGINE=PATH")
    found = {known("engine", name, [*ENGINES, "all"]): path for name, _, path in pairs}
    others = found.pop("all", None)
    return {name: others for name in ENGINES if others and name != OURS} | found

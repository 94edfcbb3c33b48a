"""`triforce bench compare`: other engines on the same checkpoint and prompts."""

from __future__ import annotations

import json
from argparse import Namespace
from math import inf
from os.path import expanduser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from triforce.backends import dispatch
from triforce.bench.compare.engines import ENGINES, OURS
from triforce.bench.compare.run import CompareConfig, rows, summary, tables
from triforce.bench.prompts import prompts
from triforce.bench.speed import WORKLOADS
from triforce.checkpoint.hub import SHIPPED
from triforce.checkpoint.model_files import GGUFModel, open_model
from triforce.cli.bench import compare_file
from triforce.cli.bench.setup import about, load, machine, make_folder, show, sources, write
from triforce.engine.inputs import known
from triforce.errors import RequestError

CONTEXTS, TOKENS = (16_384, 32_768), 64
OF_FILES = ("modes", "temperatures", "repeats")
"""Options that only a GGUF file has."""


def run(options: Namespace) -> int:
    """Print rows as they are measured, tables, and a line of JSON; an engine may be missing. Raises TriforceError."""
    for name in options.engines or []:
        known("engine", name, ENGINES)
    pythons = _pythons(options.python)
    sizes = [*(options.contexts or ()), *([] if options.tokens is None else [options.tokens])]
    if min(sizes, default=2) < 2 or not 0 < options.timeout < inf or (options.threads or 1) < 1:
        raise RequestError("--contexts and --tokens must be at least 2, --threads 1, and --timeout a time")
    threads = options.threads or dispatch.usable_cpus()
    with TemporaryDirectory() as temporary:
        work = Path(options.work or temporary)
        make_folder("--work", work)
        model = open_model(options.model or SHIPPED[0])
        if isinstance(model, GGUFModel):
            return compare_file.run(options, model, pythons, work, threads)
        return _on_folder(options, pythons, work, threads)


def _on_folder(options: Namespace, pythons: dict[str, str], work: Path, threads: int) -> int:
    if given := [name for name in OF_FILES if getattr(options, name) is not None]:
        raise RequestError(f"--{given[0]} is for a GGUF file; leave it out, or give one as MODEL")
    contexts, tokens = options.contexts or CONTEXTS, options.tokens or TOKENS
    workload, *more = options.workload or ["books"]
    if more:
        raise RequestError("--workload takes several texts for a GGUF file only; give one")
    llm = load(options)
    if llm.features:
        raise RequestError(
            f"{llm.features.path} reads hidden states, which other engines do not have; leave --draft out"
        )
    known("workload", workload, WORKLOADS)
    texts = sources(llm, options.texts)
    by_context = {context: prompts(texts, workload, context, 1)[0] for context in contexts}
    draft = llm.draft.path if llm.draft else None
    plan = CompareConfig(
        llm.target.path, draft, options.engines or list(ENGINES), tokens, threads, options.timeout, pythons, work
    )
    del llm  # its memory is for the others now
    print(machine())
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


def _pythons(given: list[str]) -> dict[str, str]:
    """Interpreters by engine; `all` is for those without one, but for triforce itself."""
    pairs = [text.partition("=") for text in given]
    if wrong := [name for name, _, path in pairs if not path]:
        raise RequestError(f"--python {wrong[0]}: give ENGINE=PATH")
    found = {known("engine", name, [*ENGINES, "all"]): expanduser(path) for name, _, path in pairs}
    others = found.pop("all", None)
    return {name: others for name in ENGINES if others and name != OURS} | found

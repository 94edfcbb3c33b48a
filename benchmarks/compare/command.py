"""`triforce bench compare`: other engines on the same checkpoint and prompts, or on the very GGUF file."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from math import inf
from os.path import expanduser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.compare import on_file, on_file_tables, on_folder
from benchmarks.compare.engines import ENGINES, ON_FILE, OURS
from benchmarks.compare.hf_folder import bits_per_weight
from benchmarks.compare.on_file import FileConfig
from benchmarks.compare.on_folder import CompareConfig
from benchmarks.compare.texts import WORKLOADS as FILE_WORKLOADS
from benchmarks.compare.workers.clock import SLACK
from triforce.backends import dispatch
from triforce.bench.prompts import prompts
from triforce.bench.results_file import ResultsFile
from triforce.bench.speed import WORKLOADS
from triforce.checkpoint.hub import FINETUNE, SHIPPED, draft_for
from triforce.checkpoint.model_files import GGUFModel, open_model
from triforce.cli.bench.setup import about, load, machine, make_folder, show, sources, sources_of, write
from triforce.cli.options import draft_named
from triforce.engine.inputs import known
from triforce.engine.tier_builder import DRAFT_MODES, MODES
from triforce.errors import RequestError, printable

CONTEXTS = (16_384, 32_768)
TOKENS = 64
FILE_CONTEXTS, FILE_TOKENS = (512, 2048, 7168), 128
"""Defaults on a GGUF file."""

OF_FILES = ("modes", "temperatures", "repeats")
"""Options that only a GGUF file has."""

PLANNED = ("engines", "modes", "workloads", "temperatures", "repeats", "level")
FIXED = ("model", "threads", "tokens", "draft", "texts", *PLANNED)
"""Keys of a report that must be equal for an incomplete file of rows to be continued."""


def run(options: Namespace) -> int:
    """Print rows as they are measured, tables, and a line of JSON; an engine may be missing. Raises TriforceError."""
    for name in options.engines or []:
        known("engine", name, ENGINES)
    interpreters = pythons(options.python)
    sizes = [*(options.contexts or ()), *([] if options.tokens is None else [options.tokens])]
    if min(sizes, default=2) < 2 or not 0 < options.timeout < inf or (options.threads or 1) < 1:
        raise RequestError("--contexts and --tokens must be at least 2, --threads 1, and --timeout a time")
    threads = options.threads or dispatch.usable_cpus()
    with TemporaryDirectory() as temporary:
        work = Path(options.work or temporary)
        make_folder("--work", work)
        model = open_model(options.model or SHIPPED[0])
        if isinstance(model, GGUFModel):
            return _on_file(options, model, interpreters, work, threads)
        return _on_folder(options, interpreters, work, threads)


def pythons(specs: list[str]) -> dict[str, str]:
    """Interpreters by engine; `all` is for those without one, but for triforce itself."""
    pairs = [text.partition("=") for text in specs]
    if wrong := [name for name, _, path in pairs if not path]:
        raise RequestError(f"--python {wrong[0]}: give ENGINE=PATH")
    paths = {known("engine", name, [*ENGINES, "all"]): expanduser(path) for name, _, path in pairs}
    default_path = paths.pop("all", None)
    return {name: default_path for name in ENGINES if default_path and name != OURS} | paths


def _on_folder(options: Namespace, pythons: Mapping[str, str], work: Path, threads: int) -> int:
    if file_options := [name for name in OF_FILES if getattr(options, name) is not None]:
        raise RequestError(f"--{file_options[0]} is for a GGUF file; leave it out, or give one as MODEL")
    contexts = options.contexts or CONTEXTS
    tokens = options.tokens or TOKENS
    workload, *more_workloads = options.workload or ["books"]
    if more_workloads:
        raise RequestError("--workload takes several texts for a GGUF file only; give one")
    llm = load(options)
    if llm.eagle_head:
        raise RequestError(
            f"{llm.eagle_head.path} reads hidden states, which other engines do not have; leave --draft out"
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
    rows = []
    for row in on_folder.rows(by_context, plan):
        rows.append(row)
        print(on_folder.line(row), flush=True)
        summary = on_folder.summary(rows)
        write(options.json, about() | {"threads": plan.threads, "summary": summary, "rows": rows})
    show(on_folder.tables(rows))
    print(json.dumps(on_folder.summary(rows)))
    return 0


def _on_file(options: Namespace, model: GGUFModel, pythons: Mapping[str, str], work: Path, threads: int) -> int:
    """Go on behind the last context that is whole, where a file of rows was cut off. Raises RequestError."""
    plan = _file_plan(options, model)
    texts = sources_of(model.tokenizer(), options.texts)
    head = about() | {"model": model.path.name, "threads": threads, "tokens": plan.tokens}
    results = ResultsFile(options.json, head | _settings(options, plan), FIXED, "summary")
    done = {row["context"] for row in results.rows if "context" in row}
    plan = replace(plan, contexts=[context for context in plan.contexts if context not in done])
    print(f"{printable(model.path.name)} on {machine()}")
    model_folder = work / model.path.stem
    make_folder("--work", model_folder)
    start = {"pythons": pythons, "threads": threads, "timeout": options.timeout, "work": model_folder}
    for _, measured in groupby(on_file.rows(texts, plan, start), lambda row: row.get("context")):
        new_rows = []
        for row in measured:
            new_rows.append(row)
            print(on_file_tables.line(row), flush=True)
        results.add([row for row in new_rows if not any(row.items() <= old_row.items() for old_row in results.rows)])
    new_rows = results.rows
    summary = on_file_tables.summary(new_rows)
    write(options.json, head | {"summary": summary, "rows": new_rows})
    show(on_file_tables.tables(new_rows))
    print(json.dumps(summary))
    return 0


def _settings(options: Namespace, plan: FileConfig) -> dict[str, Any]:
    """Return what a file that is not whole says of its rows, beside its head."""
    return {"draft": options.draft, "texts": options.texts, **{name: getattr(plan, name) for name in PLANNED}}


def _file_plan(options: Namespace, model: GGUFModel) -> FileConfig:
    """Return what is asked for, checked. Raises RequestError."""
    engines = [name for name in options.engines or ON_FILE if name != OURS]
    tokens = options.tokens or FILE_TOKENS
    draft: str | Path | None = draft_named(options)
    if draft is not None:
        draft = draft_for(model.path, model.path) if draft == "auto" else draft
        draft = draft if not draft or str(draft).startswith(FINETUNE) else open_model(draft).path
    modes = [known("mode", mode, MODES) for mode in options.modes or ("ar", "auto")]
    if drafted := [mode for mode in modes if mode in DRAFT_MODES and draft is None]:
        raise RequestError(f"mode {drafted[0]} needs a draft model; name one with --draft, or leave the mode out")
    repeats = 3 if options.repeats is None else options.repeats
    temperatures = options.temperatures or [0.0, 0.6]
    if repeats < 1 or min(temperatures) < 0:
        raise RequestError("--repeats must be at least 1, and --temperatures at least 0")
    return FileConfig(
        file=model.path,
        draft=draft,
        bits=bits_per_weight(model.path),
        engines=[known("engine", name, ON_FILE) for name in engines],
        modes=modes,
        contexts=_file_contexts(options.contexts, model, tokens),
        workloads=[known("workload", name, FILE_WORKLOADS) for name in options.workload or FILE_WORKLOADS],
        temperatures=temperatures,
        tokens=tokens,
        repeats=repeats,
        level=kernels(),
    )


def kernels() -> str:
    """Return the level of the kernels that compute here."""
    return str(dispatch.native.level()) if dispatch.native else "torch"


def _file_contexts(requested: list[int] | None, model: GGUFModel, tokens: int) -> list[int]:
    """Return the contexts that fit into the model's positions, text and all. Raises RequestError."""
    limit = model.config.positions - tokens - SLACK
    if beyond := [context for context in requested or [] if context > limit]:
        raise RequestError(
            f"--contexts {beyond[0]} and {tokens} new tokens are too many for the {model.config.positions:,} positions "
            f"of this model; give at most {limit}"
        )
    if not (fitting := [context for context in requested or FILE_CONTEXTS if context <= limit]):
        raise RequestError(f"give --contexts: at most {limit} tokens fit this model")
    return fitting

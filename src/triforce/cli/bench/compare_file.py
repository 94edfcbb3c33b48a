"""`triforce bench compare` of a GGUF file: engines on the very file, or on what they can read of it."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from triforce.backends import dispatch
from triforce.bench.compare.engines import ON_FILE, OURS
from triforce.bench.compare.hf_folder import bits_per_weight
from triforce.bench.compare.on_file import FileConfig, rows
from triforce.bench.compare.on_file_tables import line, summary, tables
from triforce.bench.compare.texts import WORKLOADS
from triforce.bench.compare.workers.clock import SLACK
from triforce.bench.results_file import ResultsFile
from triforce.checkpoint.hub import FINETUNE, draft_for
from triforce.checkpoint.model_files import GGUFModel, open_model
from triforce.cli.bench.setup import about, machine, make_folder, show, sources_of, write
from triforce.cli.options import draft_named
from triforce.engine.inputs import known
from triforce.engine.tier_builder import DRAFTED, MODES
from triforce.errors import RequestError, printable

CONTEXTS = (512, 2048, 7168)
TOKENS = 128
PLANNED = ("engines", "modes", "workloads", "temperatures", "repeats", "level")
FIXED = ("model", "threads", "tokens", "draft", "texts", *PLANNED)
"""What must be the same for a file that is not whole to be continued."""


def run(options: Namespace, model: GGUFModel, pythons: Mapping[str, str], work: Path, threads: int) -> int:
    """Print rows as they are measured, tables, and a line of JSON; an engine may be missing.

    A file that was cut off goes on behind the last context that is whole. Raises RequestError.
    """
    plan = _plan(options, model)
    texts = sources_of(model.tokenizer(), options.texts)
    head = about() | {"model": model.path.name, "threads": threads, "tokens": plan.tokens}
    results = ResultsFile(options.json, head | _settings(options, plan), FIXED, "summary")
    done = {row["context"] for row in results.rows if "context" in row}
    plan = replace(plan, contexts=[context for context in plan.contexts if context not in done])
    print(f"{printable(model.path.name)} on {machine()}")
    own = work / model.path.stem
    make_folder("--work", own)
    start = {"pythons": pythons, "threads": threads, "timeout": options.timeout, "work": own}
    for _, measured in groupby(rows(texts, plan, start), lambda row: row.get("context")):
        found = []
        for row in measured:
            found.append(row)
            print(line(row), flush=True)
        results.add([row for row in found if not any(row.items() <= kept.items() for kept in results.rows)])
    found = results.rows
    write(options.json, head | {"summary": summary(found), "rows": found})
    show(tables(found))
    print(json.dumps(summary(found)))
    return 0


def _settings(options: Namespace, plan: FileConfig) -> dict[str, Any]:
    """Return what a file that is not whole says of its rows, beside its head."""
    return {"draft": options.draft, "texts": options.texts, **{name: getattr(plan, name) for name in PLANNED}}


def _plan(options: Namespace, model: GGUFModel) -> FileConfig:
    """Return what is asked for, checked. Raises RequestError."""
    others = [name for name in options.engines or ON_FILE if name != OURS]
    tokens = options.tokens or TOKENS
    draft: str | Path | None = draft_named(options)
    if draft is not None:
        draft = draft_for(model.path, model.path) if draft == "auto" else draft
        draft = draft if not draft or str(draft).startswith(FINETUNE) else open_model(draft).path
    modes = [known("mode", mode, MODES) for mode in options.modes or ("ar", "auto")]
    if drafted := [mode for mode in modes if mode in DRAFTED and draft is None]:
        raise RequestError(f"mode {drafted[0]} needs a draft model; name one with --draft, or leave the mode out")
    repeats = 3 if options.repeats is None else options.repeats
    temperatures = options.temperatures or [0.0, 0.6]
    if repeats < 1 or min(temperatures) < 0:
        raise RequestError("--repeats must be at least 1, and --temperatures at least 0")
    return FileConfig(
        file=model.path,
        draft=draft,
        bits=bits_per_weight(model.path),
        engines=[known("engine", name, ON_FILE) for name in others],
        modes=modes,
        contexts=_contexts(options.contexts, model, tokens),
        workloads=[known("workload", name, WORKLOADS) for name in options.workload or WORKLOADS],
        temperatures=temperatures,
        tokens=tokens,
        repeats=repeats,
        level=kernels(),
    )


def kernels() -> str:
    """Return the level of the kernels that compute here."""
    return str(dispatch.native.level()) if dispatch.native else "torch"


def _contexts(given: list[int] | None, model: GGUFModel, tokens: int) -> list[int]:
    """Return the contexts that fit into the model's positions, text and all. Raises RequestError."""
    most = model.config.positions - tokens - SLACK
    if beyond := [context for context in given or [] if context > most]:
        raise RequestError(
            f"--contexts {beyond[0]} and {tokens} new tokens are too many for the {model.config.positions:,} positions "
            f"of this model; give at most {most}"
        )
    if not (fitting := [context for context in given or CONTEXTS if context <= most]):
        raise RequestError(f"give --contexts: at most {most} tokens fit this model")
    return fitting

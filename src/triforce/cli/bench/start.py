"""`triforce bench start`: seconds from the command to the first token, by step."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from pathlib import Path
from random import Random
from typing import Any

from triforce.bench import shapes
from triforce.bench.start import STEPS, rows
from triforce.checkpoint.hub import SHIPPED
from triforce.checkpoint.model_files import open_model
from triforce.cli.bench.setup import about, machine, show, write
from triforce.cli.options import draft_named
from triforce.cli.text_files import read_text, sample_book
from triforce.engine.inputs import known
from triforce.engine.tier_builder import MODES
from triforce.errors import RequestError
from triforce.tables import Table

SHORT = "It was"
POSITIONS = 32_768
"""Context of models with random weights."""


def run(options: Namespace) -> int:
    """Print a table at the end, and then a line of JSON. Raises RequestError."""
    for mode in options.modes:
        known("mode", mode, MODES)
    if options.repeats < 1 or (options.prompt_tokens is not None and options.prompt_tokens < 1):
        raise RequestError("--repeats and --prompt-tokens must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        task = _task(options, Path(folder))
        print(machine())
        measured_rows = list(rows(options.modes, task, options.repeats))
    show([_table(measured_rows)])
    print(json.dumps({"machine": machine(), "rows": measured_rows}))
    write(options.json, about() | {"repeats": options.repeats, "rows": measured_rows})
    return 0


def _task(options: Namespace, folder: Path) -> dict[str, Any]:
    """Return the task of each process. A model with random weights is written to `folder`. Raises TriforceError."""
    model = options.model
    if options.shape:
        if model:
            raise RequestError(f"--shape {options.shape} stands for a model; leave out {model}")
        shapes.write(known("shape", options.shape, shapes.SHAPES), folder, POSITIONS)
        model = str(folder)
    if options.load_cache and not Path(options.load_cache).is_file():
        advice = "name one that `triforce generate --save-cache` has written"
        raise RequestError(f"--load-cache {options.load_cache}: there is no such file; {advice}")
    task = {name: getattr(options, name) for name in ("device", "dtype", "kv_dtype", "weight_inputs", "load_cache")}
    draft = draft_named(options)
    return task | {"model": model, "draft": draft, "prompt": _prompt(options, model)}


def _prompt(options: Namespace, model: str | None) -> str | list[int]:
    """Return the text, or the ids of its first --prompt-tokens tokens; random ids for a model without a tokenizer.

    Raises RequestError if the text has fewer tokens.
    """
    files = open_model(model or SHIPPED[0])
    count = options.prompt_tokens
    if not files.has_tokenizer:
        return Random(1).choices(range(1000), k=count or 2)
    text = SHORT if count is None else sample_book()
    if options.prompt_file:
        text = read_text(options.prompt_file)
    if count is None:
        return text
    ids = files.tokenizer().encode(text)[:count]
    if len(ids) < count:
        raise RequestError(f"the text has {len(ids)} tokens; give a smaller --prompt-tokens, or a longer --prompt-file")
    return ids


def _table(measured_rows: list[dict[str, Any]]) -> Table:
    lines = []
    for row in measured_rows:
        step_cells = [f"{row['steps'][step]:.2f}" if "steps" in row else "-" for step in STEPS]
        seconds_cells = [f"{row['seconds']:.2f}", f"{row['spread']:.2f}", f"{row['of_import']:.2f}"]
        lines.append([row["mode"], row["process"], *seconds_cells, *step_cells])
    note = (
        "Seconds, medians. The first process starts without a cache folder; the second finds the files that the first "
        "has cached. The imports include the start of Python, and the prompt includes loading saved KV. The exit comes "
        "last."
    )
    return Table("To the first token", note, ["mode", "process", "all", "spread", "of import torch", *STEPS], lines)

"""What `--weight-inputs int8` costs and gains: divergence from float32, and speed of prefill, beside int16.

    python -m benchmarks.weight_inputs MODEL MODEL --texts FOLDER --json benchmarks/results/weight_inputs.json

The divergence is that of `triforce eval --only inputs`.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks import study
from triforce.backends.decoder import Decoder
from triforce.cli.bench.setup import show
from triforce.cli.options import described, json_file, quiet
from triforce.cli.text_files import book_file, read_texts
from triforce.errors import RequestError
from triforce.eval import EvalContext, eval_config, evaluate, tokenize
from triforce.eval.context import Text
from triforce.eval.rounded_inputs import COMPARED_TOKENS
from triforce.eval.scoring import full_view, prefill
from triforce.llm import LLM
from triforce.tables import Table

TURNS = 5
"""Readings of one window by each decoder, in turns."""

Row = dict[str, Any]


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="GGUF files or names with packed weights")
    add("--texts", nargs="+", metavar="TEXT", help="files or folders (default: the book of the demo)")
    add("--windows", type=int, default=2, metavar="N", help=described("readings of each kind of text at least"))
    quiet(parser)
    json_file(parser)


def measure(options: Namespace) -> None:
    """Print a table at the end. Raises RequestError for a model without packed weights."""
    if options.windows < 1:
        raise RequestError("--windows must be at least 1")
    rows = [_row(model, options) for model in options.models]
    study.write(options, {"rows": rows})
    show([table(rows)])


def _row(model: str, options: Namespace) -> Row:
    texts = read_texts(options.texts or [str(book_file())])
    llm = LLM(model, None)
    config = replace(eval_config(llm.target.config.context, COMPARED_TOKENS), windows=options.windows)
    subject = EvalContext(llm, tokenize(llm, texts), config, options.quiet)
    (result,) = evaluate(subject, ["inputs"], lambda *_: None).values()
    if reason := result.get("skipped"):
        raise RequestError(f"{model}: {reason}")
    (window, *_) = subject.windows(COMPARED_TOKENS)
    return {"model": Path(model).name, "inputs": result, "tokens_per_second": _rates(subject, window)}


def _rates(subject: EvalContext, window: Text) -> dict[str, float]:
    """Return the tokens per second of a prefill by type of inputs, medians."""
    decoders = {"int16": subject.target, "int8": subject.target.with_int8_inputs()}
    seconds: dict[str, list[float]] = {inputs: [] for inputs in decoders}
    for _ in range(TURNS):
        for inputs, decoder in decoders.items():
            seconds[inputs].append(_seconds(partial(_read, decoder, window)))
    return {inputs: len(window.ids_N) / median(times) for inputs, times in seconds.items()}


def _read(decoder: Decoder, window: Text) -> None:
    prefill(decoder, full_view(decoder, len(window.ids_N)), window.ids_N)


def _seconds(read: partial[None]) -> float:
    began = perf_counter()
    read()
    return perf_counter() - began


def table(rows: Sequence[Row]) -> Table:
    """Return one table: a line for each model and kind of text."""
    lines = []
    for row in rows:
        rates = row["tokens_per_second"]
        for kind, by_inputs in row["inputs"]["kinds"].items():
            figures = [by_inputs[inputs] for inputs in ("int16", "int8")]
            divergences = [f"{figure['kl']:.5f}, {figure['same_best']:.1%}" for figure in figures]
            lines.append([row["model"], kind, *divergences, f"{rates['int8'] / rates['int16']:.2f}"])
    note = (
        f"KL divergence from the same weights in float32, in nats per token, and equal best tokens, over windows of "
        f"{COMPARED_TOKENS} tokens. Faster: tokens per second of a prefill with int8 inputs over those with int16."
    )
    return Table("Inputs of products", note, ["model", "text", "int16", "int8", "faster"], lines)


main = study.command("weight_inputs", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())

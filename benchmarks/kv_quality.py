"""What int8 KV costs: bits per byte, loss by position, needles and copying, beside those of KV that is not rounded.

    python -m benchmarks.kv_quality --max-context 4096 --windows 2 --json benchmarks/results/kv_quality.json

The same measurements as `triforce eval`, over the same texts, of several kinds of KV in one run.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import study
from triforce.arrays import Array
from triforce.backends.decoder import Decoder, View
from triforce.backends.dispatch import native
from triforce.backends.kernel_api import ForwardBatch
from triforce.cli.bench.setup import show
from triforce.cli.options import described, json_file, quiet
from triforce.cli.text_files import book_file, read_texts
from triforce.engine.inputs import known
from triforce.errors import RequestError
from triforce.eval import EvalConfig, EvalContext, eval_config, evaluate, kv_dtypes, tokenize
from triforce.eval.kv_dtypes import MEASURED
from triforce.llm import LLM
from triforce.ragged import Ints
from triforce.tables import Table

Row = dict[str, Any]
SHIPPED = "the shipped pair"


class UpperNibbles:
    """A decoder whose passes read what is committed as the tier below the full one does: four bits of eight.

    Keys of its own pass are read whole, and so are those of a block of 64 that is not yet full.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def __call__(self, ids_BT: Ints, counts_B: Ints, cache: Any, at_BJ: Ints | None = None) -> Array:
        cache.kv.int8 = True
        return self.decoder(ids_BT, counts_B, Committed(cache), at_BJ)


class Committed:
    """A view whose passes take what is committed from lower views of it."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.kv = view.kv
        self.record = view.record

    def begin(self, counts_B: Ints, width: int) -> ForwardBatch:
        batch = self.view.begin(counts_B, width)
        return replace(batch, views=[(n, replace(lists, low_precision_ends=lists.starts)) for n, lists in batch.views])


def unrotated(decoder: Decoder) -> Decoder:
    """Let a decoder round heads as they are."""
    decoder.config = replace(decoder.config, hadamard=False)
    return decoder


KINDS: dict[str, tuple[str, Callable[[Decoder], Any]]] = {
    "bfloat16": ("bfloat16", lambda decoder: decoder),
    "int8": ("int8", lambda decoder: decoder),
    "int8, heads not rotated": ("int8", unrotated),
    "upper nibbles alone": ("int8", UpperNibbles),
    "upper nibbles alone, heads not rotated": ("int8", lambda decoder: UpperNibbles(unrotated(decoder))),
}
"""Kinds of KV: the type, and what else is done to the decoder."""


@dataclass(eq=False)
class KVContext(EvalContext):
    """A model that is measured with another decoder than its own."""

    decoder: Any = None

    @property
    def target(self) -> Decoder:
        return self.decoder  # type: ignore[no-any-return]


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "models",
        nargs="*",
        default=[SHIPPED],
        metavar="MODEL",
        help="folders, files or names (default: the shipped pair)",
    )
    add("--texts", nargs="+", metavar="TEXT", help="files or folders (default: the book of the demo)")
    add("--max-context", type=int, default=2048, metavar="N", help=described("tokens read at most"))
    add("--windows", type=int, default=4, metavar="N", help=described("readings of each kind of text at least"))
    add("--only", default=",".join(MEASURED), metavar="NAME,...", help=described("measurements"))
    quiet(parser)
    json_file(parser)


def measure(options: Namespace) -> None:
    """Print tables at the end. Raises RequestError where they cannot be measured."""
    if options.max_context < 128 or options.windows < 1:
        raise RequestError("--max-context must be at least 128, and --windows 1")
    options.only = [known("measurement", name, MEASURED) for name in options.only.split(",")]
    if native is None:
        raise RequestError("only native kernels read upper nibbles; compile them with make native")
    measured_rows = [row for model in options.models for row in rows(model, options)]
    study.write(options, {"rows": measured_rows})
    show(tables(measured_rows))


def rows(model: str, options: Namespace) -> Iterator[Row]:
    """Yield a row for each kind of KV."""
    texts = read_texts(options.texts or [str(book_file())])
    for kind, (dtype, changed) in KINDS.items():
        llm = LLM(None if model == SHIPPED else model, None, dtype="bfloat16", kv_dtype=dtype)
        numbers: EvalConfig = eval_config(llm.target.config.context, options.max_context)
        numbers = replace(numbers, windows=options.windows)
        subject = KVContext(llm, tokenize(llm, texts), numbers, options.quiet, decoder=changed(llm.target.decoder))
        row_head = {"model": Path(model).name, "kv": kind, "context": numbers.longest_window}
        yield row_head | evaluate(subject, options.only, lambda *_: None)


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return two tables for each model: a line for each kind of KV."""
    note = (
        "Upper nibbles alone are what the tier below the full one reads with `--lower-tiers`. Here all of a text is "
        "read so, but for the keys of a pass itself, at most 512 tokens."
    )
    models = dict.fromkeys(row["model"] for row in rows)
    model_tables = (kv_dtypes.tables([row for row in rows if row["model"] == model], note) for model in models)
    return [table for tables_of_model in model_tables for table in tables_of_model]


main = study.command("kv_quality", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())

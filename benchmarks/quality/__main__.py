"""Quality under eviction: StreamingLLM and H2O beside lossless decoding, on needles and passages to copy.

python -m benchmarks.quality --json benchmarks/results/quality.json
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial

from tqdm import tqdm

from benchmarks import study
from benchmarks.quality.measure import QualityConfig, rows, tables
from triforce.cli.bench.parts import texts
from triforce.cli.bench.report import about, show, write
from triforce.cli.bench.setup import load, sources
from triforce.cli.options import described, draft, json_file, model, placement, quiet, several
from triforce.cli.progress import Prefill
from triforce.cli.text_files import require_writable


def main(arguments: Sequence[str] | None = None) -> int:
    return study.run("quality", __doc__, add_arguments, measure, arguments)


def add_arguments(parser: ArgumentParser) -> None:
    model(parser)
    draft(parser)
    texts(parser)
    add = parser.add_argument
    add("--contexts", type=several(int), default=[4096, 16_384], metavar="N,...", help="prompt tokens")
    add("--budgets", type=several(int), default=[512, 2048], metavar="N,...", help="tokens that each keeps or sees")
    add("--questions", type=int, default=8, metavar="N", help=described("needles and passages asked for, each"))
    add("--tokens", type=int, default=64, metavar="N", help=described("new ones of a passage"))
    quiet(parser)
    placement(parser, context=False)
    json_file(parser)


def measure(options: Namespace) -> int:
    """Print a table at the end."""
    require_writable(options.json)
    plan = QualityConfig(options.contexts, options.budgets, options.questions, options.tokens)
    llm = load(options)
    made = rows(llm, sources(llm, options.texts), plan, partial(Prefill, options.quiet))
    found = list(tqdm(made, desc="quality", disable=options.quiet or None, leave=False))
    write(options.json, about(options.command) | {"model": options.model or "the shipped pair", "rows": found})
    show(tables(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

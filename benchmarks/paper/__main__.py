"""The paper's tables and figures, all or some, beside the paper's own numbers.

    python -m benchmarks.paper table1 figure6a --json benchmarks/results/paper.json

Rows are added to a file that already has others.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import study
from benchmarks.paper import acceptance, speed
from benchmarks.paper.experiment import Experiment, Setup
from triforce.cli.bench.setup import about, load, show, sources, write
from triforce.errors import RequestError
from triforce.tables import Table

EXPERIMENTS: dict[str, Experiment] = acceptance.EXPERIMENTS | speed.EXPERIMENTS
QUICK = {"context": 2048, "tokens": 32, "repeats": 1, "positions": 35}


def measure(options: Namespace) -> None:
    """Print a table for each experiment, and keep its rows."""
    names = chosen_experiments(options.names)
    earlier = read(options.json)
    setup = setup_of(options)
    with setup.measuring():
        for name in names:
            rows = EXPERIMENTS[name].measure(setup)
            show([EXPERIMENTS[name].shown(rows)])
            earlier[name] = {**about(options.command), "context": setup.context, "rows": rows}
            write(options.json, earlier)
    show([absent()])


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(EXPERIMENTS)} (default: all)")
    parser.add_argument("--model", help="folder or hub name; the shipped pair if left out")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--coupling", default="seeded")
    parser.add_argument("--texts", nargs="+", help="files or folders (default: what ships with triforce)")
    parser.add_argument("--context", type=int, help="tokens of the prompts")
    parser.add_argument("--tokens", type=int, help="new tokens, where the paper does not say")
    parser.add_argument("--repeats", type=int, help="turns")
    parser.add_argument("--positions", type=int, help="of given texts that are measured")
    parser.add_argument("--quick", action="store_true", help="short prompts and few settings: to see that it works")
    parser.add_argument("--json", metavar="FILE", help="keep the rows there, beside those of other experiments")


def chosen_experiments(names: Sequence[str]) -> list[str]:
    """Return the experiments named, or all. Raises RequestError."""
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        why = speed.ABSENT.get(unknown[0], f"choose from {', '.join(EXPERIMENTS)}")
        raise RequestError(f"{unknown[0]} cannot be run: {why}")
    return list(names or EXPERIMENTS)


def setup_of(options: Namespace) -> Setup:
    """Load the models, and take the numbers that were given, else those of a quick look or the usual ones."""
    llm = load(options)
    chosen_values: dict[str, Any] = {name: value for name in QUICK if (value := getattr(options, name)) is not None}
    return Setup(
        llm, sources(llm, options.texts), quick=options.quick, **(QUICK if options.quick else {}) | chosen_values
    )


def read(file: str | None) -> dict[str, Any]:
    """Return the earlier experiments in a file. Raises RequestError, before anything is measured."""
    if file is None or not Path(file).exists():
        return {}
    try:
        return dict(json.loads(Path(file).read_text(encoding="utf-8")))
    except ValueError as error:
        raise RequestError(f"{file} is not a file of results ({error}); name another one") from error


def absent() -> Table:
    """Return a table of what the paper has and cannot be run here."""
    lines = [[name, why] for name, why in speed.ABSENT.items()]
    return Table("Absent", "Figures in brackets are the paper's.", ["what", "why"], lines)


main = study.command("paper", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())

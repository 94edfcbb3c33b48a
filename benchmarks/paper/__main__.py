"""Runs tables and figures of the paper, all or some, and writes their rows to a file that already has others.

python -m benchmarks.paper table1 figure6a --json benchmarks/results/paper.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper import acceptance, speed
from benchmarks.paper.experiment import Experiment, Setup
from triforce import LLM
from triforce.bench.results_file import dumps
from triforce.cli.bench.common import about, show, sources
from triforce.errors import RequestError, TriforceError
from triforce.eval import Table

EXPERIMENTS: dict[str, Experiment] = acceptance.EXPERIMENTS | speed.EXPERIMENTS
QUICK = {"context": 2048, "tokens": 32, "repeats": 1, "positions": 35}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        names = wanted(options.names)
        setup, earlier = made(options), read(options.json)
        with setup.measuring():
            for name in names:
                rows = EXPERIMENTS[name].measure(setup)
                show([EXPERIMENTS[name].shown(rows)])
                earlier[name] = {**about(), "command": command(arguments), "context": setup.context, "rows": rows}
                if options.json:
                    options.json.write_text(dumps(earlier), encoding="utf-8")
    except (TriforceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show([absent()])
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(EXPERIMENTS)} (default: all)")
    parser.add_argument("--model", help="folder or hub name; the shipped pair if left out")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--coupling", default="seeded")
    parser.add_argument("--texts", nargs="+", help="files or folders (default: what ships with triforce)")
    parser.add_argument("--context", type=int, default=Setup.context, help="tokens of the prompts")
    parser.add_argument("--tokens", type=int, default=Setup.tokens, help="new tokens, where the paper does not say")
    parser.add_argument("--repeats", type=int, default=Setup.repeats, help="turns")
    parser.add_argument("--positions", type=int, default=Setup.positions, help="of given texts that are measured")
    parser.add_argument("--quick", action="store_true", help="short prompts and few settings: to see that it works")
    parser.add_argument("--json", type=Path, help="keep the rows there, beside those of other experiments")
    if "--quick" in (sys.argv if arguments is None else arguments):
        parser.set_defaults(**QUICK)
    return parser.parse_args(arguments)


def wanted(names: Sequence[str]) -> list[str]:
    """Those named, or all. Raises RequestError."""
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        why = speed.ABSENT.get(unknown[0], f"choose from {', '.join(EXPERIMENTS)}")
        raise RequestError(f"{unknown[0]} cannot be run: {why}")
    return list(names or EXPERIMENTS)


def made(options: argparse.Namespace) -> Setup:
    llm = LLM(options.model, options.draft, coupling=options.coupling)
    numbers = {name: getattr(options, name) for name in ("context", "tokens", "repeats", "positions", "quick")}
    return Setup(llm, sources(llm, options.texts), **numbers)


def read(file: Path | None) -> dict[str, Any]:
    """What the file has of earlier experiments. Raises RequestError, before anything is measured."""
    if file is None or not file.exists():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise RequestError(f"{file} is not a file of results ({error}); name another one") from error


def command(arguments: Sequence[str] | None) -> str:
    return " ".join(["python -m benchmarks.paper", *(sys.argv[1:] if arguments is None else arguments)])


def absent() -> Table:
    """What the paper has and cannot be run here."""
    lines = [[name, why] for name, why in speed.ABSENT.items()]
    return Table("Absent", "Figures in brackets are the paper's.", ["what", "why"], lines)


if __name__ == "__main__":
    sys.exit(main())

"""The command line of a study: arguments as `triforce` reads them, its exit codes, the file of its figures, and where
those come from."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from triforce.bench import results_file
from triforce.cli import exit_code
from triforce.cli.arguments import Parser
from triforce.cli.bench import setup
from triforce.cli.parser import read
from triforce.cli.text_files import require_writable

Add = Callable[[Parser], None]
Measure = Callable[[argparse.Namespace], int | None]


def command(name: str, doc: str | None, add: Add, measure: Measure) -> Callable[..., int]:
    """Return the main function of a study: it takes arguments, those of the process if None, and gives an exit code.

    A mistake of the user is one message on stderr and code 2. doc: the docstring of its module; the help shows its
    first line. add: adds its arguments to a parser. measure: takes the arguments, with the whole command line as
    `command`; the file that `json` names can be written. If `measure` returns a number, that is the exit code.
    """

    def main(arguments: Sequence[str] | None = None) -> int:
        return exit_code(partial(measured, parse(name, doc, add, arguments)))

    def measured(options: argparse.Namespace) -> int:
        require_writable(getattr(options, "json", None), "--json")
        results_file.commit()  # before anything is measured: others may commit meanwhile
        return measure(options) or 0

    return main


def parse(name: str, doc: str | None, add: Add, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of a study; a mistake ends the process with code 2, as for `triforce`."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(prog=f"python -m benchmarks.{name}", description=(doc or "").split("\n")[0])
    add(parser)
    options, _ = read(parser, argv)
    options.command = " ".join([parser.prog, *argv])
    return options


def write(options: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Write figures, and where they come from, to the file that --json names, if any."""
    setup.write(options.json, setup.about(options.command) | figures)


def origin(report: dict[str, Any]) -> str:
    """Return in a sentence which commit and bench figures are of, or what recorded them before that was written.

    It goes behind another one, and is nothing where nothing is known.
    """
    names = [name for name in ("commit", "level", "bench", "recorded_in") if report.get(name) is not None]
    words = [f"{name.replace('_', ' ')} {report[name]}".replace("bench old bench", "old bench") for name in names]
    row_commits = [row[name] for row in report.get("rows", ()) for name in ("commit", "recorded_in") if row.get(name)]
    origin_text = ", ".join(
        [*words, *([f"some rows in {', '.join(dict.fromkeys(row_commits))}"] if row_commits else [])]
    )
    return origin_text and f" {origin_text[0].upper()}{origin_text[1:]}."

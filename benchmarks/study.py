"""The command line of a study: arguments as `triforce` reads them, and its exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

from triforce.cli import exit_code
from triforce.cli.arguments import Parser
from triforce.cli.parser import read


def run(
    name: str,
    about: str | None,
    add: Callable[[Parser], None],
    measure: Callable[[argparse.Namespace], int],
    arguments: Sequence[str] | None,
) -> int:
    """Run a study; its exit code. A mistake of the user is one message on stderr and code 2.

    about: the docstring of its module, of which the help shows the first line. add: adds its arguments to a parser.
    measure: takes the arguments, with the whole command line as `command`. arguments: those of the process if None.
    """
    return exit_code(partial(measure, parse(name, about, add, arguments)))


def parse(
    name: str, about: str | None, add: Callable[[Parser], None], arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Return the arguments of a study; a mistake ends the process with code 2, as for `triforce`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(prog=f"python -m benchmarks.{name}", description=(about or "").split("\n")[0])
    add(parser)
    options, _ = read(parser, given)
    options.command = " ".join([parser.prog, *given])
    return options

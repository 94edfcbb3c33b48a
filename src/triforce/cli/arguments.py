"""A parser whose errors are one line: the mistake, what may have been meant, and where to read more."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NoReturn

from triforce.cli import habits
from triforce.errors import suggest


class Parser(argparse.ArgumentParser):
    """A parser that sets `leaf` in its result to the parser of the command, which knows its options."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how, allow_abbrev=False)
        self.set_defaults(leaf=self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but for options of other programs, which are told what they are called here."""
        given = sys.argv[1:] if args is None else list(args)
        options = self._option_string_actions
        # What stands behind a command is looked at by its own parser.
        own = takewhile(lambda argument: argument.startswith("-"), given) if self._subparsers else given
        if found := habits.option_advice(own, options):
            self.error(f"{found[0]} is not an option of {self.prog}: {found[1]}")
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"triforce: error: {message}; see {self.prog} --help\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Report the first of the arguments that nothing takes, and exit."""
        option = next((each.partition("=")[0] for each in unknown if each.startswith("-")), None)
        if option is None:
            self.error(f"there is no place for {' '.join(unknown)}")
        if option in self._option_string_actions:
            self.error(f"{option} comes behind the command: {self.prog} {option}")
        self.error(f"{option} is not an option of {self.prog}{suggest(option, self._option_string_actions)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check choices as argparse does, in our words: its own suggestions come with Python 3.14."""
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            if action.metavar == "COMMAND" and value in habits.COMMANDS:
                raise argparse.ArgumentError(None, f"{value!r} is not a command of triforce: {habits.COMMANDS[value]}")
            near = suggest(str(value), names)
            raise argparse.ArgumentError(action, f"{value!r} is not known{near}; choose from {', '.join(names)}")

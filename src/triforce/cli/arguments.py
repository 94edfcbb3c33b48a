"""A parser whose errors are one line: the mistake, what may have been meant, and where to read more."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from triforce.cli import habits
from triforce.cli.options import STANDARD, minutes, path, path_or_standard
from triforce.errors import suggest

DASHES = "\u2010\u2011\u2012\u2013\u2014\u2212"
"""Dashes that stand where `--` was typed."""
QUOTES = "a PROMPT of several words is one argument, in quotes"
NUMBER = re.compile(r"[\d.]+")
NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number", minutes: "a number of minutes"}
"""Types of numbers, in words."""


def has_space(argument: str) -> bool:
    """Whether there is white space in an argument, as in texts and not in names of options."""
    return any(map(str.isspace, argument))


def is_option(argument: str) -> bool:
    """Whether an argument reads as an option: it begins with a dash, and its name has no white space."""
    return argument.startswith("-") and argument != STANDARD and not has_space(argument.partition("=")[0])


class Parser(argparse.ArgumentParser):
    """A parser that sets `leaf` in its result to the parser of the command, which knows its options."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how, allow_abbrev=False)
        self.set_defaults(leaf=self)
        self._behind: dict[str, str] = {}
        """Arguments that read as options, behind options that take a text, by the names of these."""
        self._behind_dashes: Sequence[str] = ()
        """Arguments behind `--`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but for options of other programs, which are told what they are called here."""
        given = sys.argv[1:] if args is None else list(args)
        options = self._option_string_actions
        if not self._subparsers:
            given = self._with_values(given)
        # What stands behind a command is looked at by its own parser.
        own = list(takewhile(lambda argument: argument.startswith("-"), given)) if self._subparsers else given
        for argument in own:
            self._require_hyphens(argument)
        if found := habits.option_advice(own, options):
            self.error(f"{found[0]} is not an option of {self.prog}: {found[1]}")
        return super().parse_known_args(given, namespace)

    def _with_values(self, given: Sequence[str]) -> list[str]:
        """Join options and values behind them that begin with a dash, which argparse would take for options.

        Such a value is a text with white space, a number, or no option of this parser, nor nearly one.
        """
        joined: list[str] = []
        for n, argument in enumerate(given):
            if argument == "--":
                self._behind_dashes = given[n + 1 :]
                return joined + list(given[n:])
            name = self._long_name(joined[-1]) if joined else ""
            if name and argument.startswith("-") and argument != STANDARD and self._is_value(argument):
                joined[-1] = f"{name}={argument}"
            else:
                if name and is_option(argument):
                    self._behind[name] = argument
                joined.append(argument)
        return joined

    def _require_hyphens(self, argument: str) -> None:
        """Exit where an option begins with another dash than the hyphen, as a word processor writes it."""
        name = argument.partition("=")[0].lstrip("-" + DASHES)
        if argument.startswith(tuple(DASHES)) and f"--{name}" in self._option_string_actions:
            self.error(f"{argument} begins with another dash than the hyphen; did you mean --{name}?")

    def _long_name(self, argument: str) -> str:
        """Return the long name of an option that takes one value; nothing for what is none."""
        action = self._option_string_actions.get(argument)
        takes_one = action is not None and action.nargs is None and not action.const
        return action.option_strings[-1] if action is not None and takes_one else ""

    def _is_value(self, argument: str) -> bool:
        if has_space(argument):
            return True
        name = argument.partition("=")[0]
        options = self._option_string_actions
        known = name in options or name in habits.ADVICE or (name[:2] in options and NUMBER.fullmatch(name[2:]))
        return not known and not (name.startswith("--") and suggest(name, options))

    def _parse_optional(self, arg_string: str) -> Any:
        """Take what has white space for no option, unless its value stands behind `=`; refuse attached texts."""
        name = arg_string.partition("=")[0]
        if has_space(arg_string) and (has_space(name) or name not in self._option_string_actions):
            return None
        if re.match("-[^-].", arg_string) and arg_string not in self._option_string_actions:
            self._require_detached(arg_string)
        return super()._parse_optional(arg_string)

    def _require_detached(self, argument: str) -> None:
        """Exit where a text is attached to its option: it may be one text that begins with a dash."""
        if f"-{argument.partition('=')[0]}" in self._option_string_actions:
            return  # a long name with one dash, which `refuse` tells of
        name = self._long_name(argument[:2])
        takes_text = name and self._option_string_actions[name].type in (None, path, path_or_standard)
        if takes_text and argument[2] != "=":
            self.error(f"{argument} may be a text or an option; give {argument[:2]} its value as {name}={argument[2:]}"
                       + self._as_prompt(argument))  # fmt: skip
        if argument[:2] in ("-h", *habits.ADVICE) and not NUMBER.fullmatch(argument[2:]) and self._as_prompt(argument):
            self.error(f"{argument} is not an option of {self.prog}{self._as_prompt(argument)}")

    def _as_prompt(self, argument: str) -> str:
        """Return how a command that has a prompt takes a text that begins with a dash; nothing for other commands."""
        return f"; as the prompt it is --prompt={argument}" if "--prompt" in self._option_string_actions else ""

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help or a mistake. argparse would drop what cannot be written, and say nothing."""
        if message:
            (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"triforce: error: {message}; see {self.prog} --help\n")

    def refuse(self, unknown: Sequence[str], root: Parser) -> NoReturn:
        """Report the first of the arguments that nothing takes, and exit. root: the parser of all commands."""
        if dashed := next((each for each in self._behind_dashes if self._names_option(each)), None):
            self.error(f"{dashed} stands behind --, where everything is an argument; put options in front of it")
        options = (each for each in unknown if is_option(each) and each not in self._behind_dashes)
        option = next((each.partition("=")[0] for each in options), None)
        if option is None:
            quotes = f"; {QUOTES}" * ("--prompt" in self._option_string_actions)
            self.error(f"there is no place for {' '.join(unknown)}, which is more than {self.prog} takes{quotes}")
        if option in self._option_string_actions:
            self.error(f"{option} comes behind the command: {self.prog} {option}")
        long = f"-{option}" if f"-{option}" in self._option_string_actions else option
        near = suggest(long, self._option_string_actions) or self._as_prompt(option) * bool(re.match("-[^-].", option))
        self.error(f"{option} is not an option of {self.prog}{near or root.owners(option)}")

    def _names_option(self, argument: str) -> bool:
        """Whether an argument is an option of this parser, with or without its value."""
        name = argument.partition("=")[0]
        return is_option(argument) and (name in self._option_string_actions or bool(self._long_name(name[:2])))

    def owners(self, option: str) -> str:
        """Return which commands have an option, to stand behind a command that has not; nothing where none has it."""
        names = [name for name, parser in self._leaves() if option in parser._option_string_actions]
        return f"; it is one of {', '.join(names)}" if names and len(option) > 2 else ""

    def _leaves(self) -> Iterator[tuple[str, Parser]]:
        """Yield the names, of one word or two, and the parsers of all commands that do something."""
        for name, parser in self.commands.items():
            if parser.commands:
                yield from ((f"{name} {part}", leaf) for part, leaf in parser._leaves())
            else:
                yield name, parser

    @property
    def commands(self) -> dict[str, Parser]:
        """The parsers of the commands that follow, by name; of a command without any, none."""
        return dict(self._subparsers._group_actions[0].choices or {}) if self._subparsers else {}

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Convert a value as argparse does, and say in our words what is no number."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if action.type in NUMBERS and isinstance(error.__context__, ValueError):
                raise argparse.ArgumentError(action, f"{arg_string!r} is not {NUMBERS[action.type]}") from None
            raise

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        """Count values as argparse does, and say how a text is given that reads as an option."""
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            name = action.option_strings[-1] if action.option_strings else ""
            if name in self._behind and action.type not in NUMBERS and action.choices is None:
                error.message += f"; as a text {self._behind[name]} is {name}={self._behind[name]}"
            raise

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check choices as argparse does, in our words: its own suggestions come with Python 3.14."""
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            if action.metavar == "COMMAND" and value in habits.COMMANDS:
                raise argparse.ArgumentError(None, f"{value!r} is not a command of triforce: {habits.COMMANDS[value]}")
            near = suggest(str(value), names)
            raise argparse.ArgumentError(action, f"{value!r} is not known{near}; choose from {', '.join(names)}")

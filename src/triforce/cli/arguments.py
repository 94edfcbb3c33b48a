"""A parser whose errors are one line: the mistake, a suggestion, and where to read more."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from triforce.cli import habits
from triforce.cli.options import STANDARD_STREAM, minutes, path, path_or_standard
from triforce.errors import suggest

DASHES = "\u2010\u2011\u2012\u2013\u2014\u2212"
"""Dashes that word processors put in place of `--`."""
QUOTES_ADVICE = "a PROMPT of several words is one argument, in quotes"
NUMBER = re.compile(r"[\d.]+")
NUMBER_TYPES: dict[Any, str] = {int: "a whole number", float: "a number", minutes: "a number of minutes"}
"""Types of numbers, in words."""


def has_space(argument: str) -> bool:
    """Whether an argument has white space. A text may have it; the name of an option has none."""
    return any(map(str.isspace, argument))


def is_option(argument: str) -> bool:
    """Whether an argument reads as an option: it begins with a dash, and its name has no white space."""
    return argument.startswith("-") and argument != STANDARD_STREAM and not has_space(argument.partition("=")[0])


class Parser(argparse.ArgumentParser):
    """A parser that sets `leaf` in its namespace to the parser of the command, which has the command's options."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)
        self.set_defaults(leaf=self)
        self._option_behind: dict[str, str] = {}
        """Arguments that look like options and follow an option that takes a value, by the name of that option."""
        self._behind_dashes: Sequence[str] = ()
        """Arguments behind `--`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does. For an option of another program, exit with advice on its name here."""
        arguments = sys.argv[1:] if args is None else list(args)
        options = self._option_string_actions
        if not self._subparsers:
            arguments = self._with_values(arguments)
        # Arguments behind a command are checked by the command's own parser.
        command_arguments = (
            list(takewhile(lambda argument: argument.startswith("-"), arguments)) if self._subparsers else arguments
        )
        for argument in command_arguments:
            self._require_hyphens(argument)
        if advice := habits.option_advice(command_arguments, options):
            self.error(f"{advice[0]} is not an option of {self.prog}: {advice[1]}")
        return super().parse_known_args(arguments, namespace)

    def _with_values(self, arguments: Sequence[str]) -> list[str]:
        """Join an option with a following value that begins with a dash: argparse would take the value for an option.

        Such a value is a text with white space, a number, or a word that is neither an option nor close to one.
        """
        joined: list[str] = []
        for n, argument in enumerate(arguments):
            if argument == "--":
                self._behind_dashes = arguments[n + 1 :]
                return joined + list(arguments[n:])
            name = self._long_name(joined[-1]) if joined else ""
            if name and argument.startswith("-") and argument != STANDARD_STREAM and self._is_value(argument):
                joined[-1] = f"{name}={argument}"
            else:
                if name and is_option(argument):
                    self._option_behind[name] = argument
                joined.append(argument)
        return joined

    def _require_hyphens(self, argument: str) -> None:
        """Exit if an option begins with another dash than the hyphen, as a word processor writes it."""
        name = argument.partition("=")[0].lstrip("-" + DASHES)
        if argument.startswith(tuple(DASHES)) and f"--{name}" in self._option_string_actions:
            self.error(f"{argument} begins with another dash than the hyphen; did you mean --{name}?")

    def _long_name(self, argument: str) -> str:
        """Return the long name of an option that takes one value; empty for any other argument."""
        action = self._option_string_actions.get(argument)
        takes_one = action is not None and action.nargs is None and not action.const
        return action.option_strings[-1] if action is not None and takes_one else ""

    def _is_value(self, argument: str) -> bool:
        if has_space(argument):
            return True
        name = argument.partition("=")[0]
        options = self._option_string_actions
        is_known_option = (
            name in options or name in habits.ADVICE or (name[:2] in options and NUMBER.fullmatch(name[2:]))
        )
        return not is_known_option and not (name.startswith("--") and suggest(name, options))

    def _parse_optional(self, arg_string: str) -> Any:
        """Treat an argument with white space as no option, unless it is `NAME=VALUE`; refuse attached texts."""
        name = arg_string.partition("=")[0]
        if has_space(arg_string) and (has_space(name) or name not in self._option_string_actions):
            return None
        if re.match("-[^-].", arg_string) and arg_string not in self._option_string_actions:
            self._require_detached(arg_string)
        return super()._parse_optional(arg_string)

    def _require_detached(self, argument: str) -> None:
        """Exit if a text is attached to a short option: `-plan` may be `-p lan`, or a text that begins with a dash."""
        if f"-{argument.partition('=')[0]}" in self._option_string_actions:
            return  # a long name with one dash, which `refuse` reports
        name = self._long_name(argument[:2])
        takes_text = name and self._option_string_actions[name].type in (None, path, path_or_standard)
        if takes_text and argument[2] != "=":
            self.error(f"{argument} may be a text or an option; give {argument[:2]} its value as {name}={argument[2:]}"
                       + self._prompt_advice(argument))  # fmt: skip
        if (
            argument[:2] in ("-h", *habits.ADVICE)
            and not NUMBER.fullmatch(argument[2:])
            and self._prompt_advice(argument)
        ):
            self.error(f"{argument} is not an option of {self.prog}{self._prompt_advice(argument)}")

    def _prompt_advice(self, argument: str) -> str:
        """Return advice on a prompt that begins with a dash; empty for commands without a prompt."""
        return f"; to pass it as the prompt: --prompt={argument}" if "--prompt" in self._option_string_actions else ""

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help or a mistake. argparse would silently drop a message that cannot be written."""
        if message:
            (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"triforce: error: {message}; see {self.prog} --help\n")

    def refuse(self, arguments: Sequence[str], root: Parser) -> NoReturn:
        """Report the first argument that no option or place takes, and exit. root: the parser of all commands."""
        if dashed_option := next((argument for argument in self._behind_dashes if self._names_option(argument)), None):
            self.error(f"{dashed_option} comes after --, which ends the options; put options before it")
        options = (argument for argument in arguments if is_option(argument) and argument not in self._behind_dashes)
        option = next((argument.partition("=")[0] for argument in options), None)
        if option is None:
            quotes = f"; {QUOTES_ADVICE}" * ("--prompt" in self._option_string_actions)
            self.error(f"too many arguments for {self.prog}: {' '.join(arguments)}{quotes}")
        if option in self._option_string_actions:
            self.error(f"{option} comes after the command: {self.prog} {option}")
        long_name = f"-{option}" if f"-{option}" in self._option_string_actions else option
        suggestion = suggest(long_name, self._option_string_actions) or self._prompt_advice(option) * bool(
            re.match("-[^-].", option)
        )
        self.error(f"{option} is not an option of {self.prog}{suggestion or root.owners(option)}")

    def _names_option(self, argument: str) -> bool:
        """Whether an argument is an option of this parser, with or without its value."""
        name = argument.partition("=")[0]
        return is_option(argument) and (name in self._option_string_actions or bool(self._long_name(name[:2])))

    def owners(self, option: str) -> str:
        """Return a phrase with the commands that have an option; empty if no command has it."""
        names = [name for name, parser in self._leaves() if option in parser._option_string_actions]
        return f"; it is an option of {', '.join(names)}" if names and len(option) > 2 else ""

    def _leaves(self) -> Iterator[tuple[str, Parser]]:
        """Yield the name, of one word or two, and the parser of each command that has no subcommands."""
        for name, parser in self.commands.items():
            if parser.commands:
                yield from ((f"{name} {part}", leaf) for part, leaf in parser._leaves())
            else:
                yield name, parser

    @property
    def commands(self) -> dict[str, Parser]:
        """Parsers of subcommands by name; empty for a command without subcommands."""
        return dict(self._subparsers._group_actions[0].choices or {}) if self._subparsers else {}

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Convert a value as argparse does, with a message of ours for a value that is no number."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if action.type in NUMBER_TYPES and isinstance(error.__context__, ValueError):
                raise argparse.ArgumentError(action, f"{arg_string!r} is not {NUMBER_TYPES[action.type]}") from None
            raise

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        """Count values as argparse does, and add to its error how to pass a text that reads as an option."""
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            name = action.option_strings[-1] if action.option_strings else ""
            if name in self._option_behind and action.type not in NUMBER_TYPES and action.choices is None:
                error.message += f"; to pass {self._option_behind[name]} as a text: {name}={self._option_behind[name]}"
            raise

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check choices as argparse does, with a message of ours: its own suggestions come with Python 3.14."""
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            if action.metavar == "COMMAND" and value in habits.COMMANDS:
                raise argparse.ArgumentError(None, f"{value!r} is not a command of triforce: {habits.COMMANDS[value]}")
            suggestion = suggest(str(value), names)
            raise argparse.ArgumentError(action, f"{value!r} is not known{suggestion}; choose from {', '.join(names)}")

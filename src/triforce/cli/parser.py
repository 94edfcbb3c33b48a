"""The arguments of `triforce`. Imports nothing heavy: the help answers at once."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from triforce import __version__
from triforce.cli.argument_values import EMPTY
from triforce.cli.arguments import Parser, is_option
from triforce.cli.model_or_prompt import reads_as_prompt
from triforce.cli.subcommands import COMMANDS

CANNOT_CHAT = "the pair that comes with triforce cannot chat, as it has no chat template"
CHATS = (
    "give a MODEL that has one: smollm2, which is small (98 MB are fetched once), or the folder, GGUF file or hub name "
    "of an instruct model"
)


def build_parser() -> Parser:
    """The parser of all commands; `command` in its result names the module of triforce.cli to run."""
    parser = Parser(
        prog="triforce",
        description="Lossless long-context speculative decoding: three tiers, and the text of plain decoding.",
    )
    parser.add_argument("--version", action="version", version=f"triforce {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary, add in COMMANDS:
        add(commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."))
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, those that options separate too: `generate MODEL --seed 1 PROMPT` is more than argparse takes.

    Nothing at all asks for help.
    """
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow
        import argcomplete

        argcomplete.autocomplete(parser)
    options, leaf = read(parser, argv)
    if options.command is None:
        parser.print_help()
        parser.exit()
    if leaf.commands:
        leaf.error(f"{leaf.prog} does nothing alone; put one of these behind it: {', '.join(leaf.commands)}")
    if options.command == "chat" and options.model is None:
        leaf.error(f"{CANNOT_CHAT}; {CHATS}")
    return options


def read(parser: Parser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, Parser]:
    """Return the arguments and the parser of the command that they name; a mistake ends the process with code 2."""
    options, rest = parser.parse_known_args(argv)
    leaf: Parser = vars(options).pop("leaf")
    for slot in ("model", "prompt"):
        if rest and not is_option(rest[0]) and getattr(options, slot, "") is None:
            setattr(options, slot, rest.pop(0))
    if rest:
        leaf.refuse(rest, parser)
    _take_named(options, leaf)
    return options, leaf


def _take_named(options: argparse.Namespace, leaf: Parser) -> None:
    """-m and -p in the places of MODEL and PROMPT. With -m, or if it reads so, a single argument is the PROMPT."""
    options.alone = False
    model, prompt = (vars(options).pop(f"named_{slot}", None) for slot in ("model", "prompt"))
    alone = getattr(options, "prompt", "") is None and prompt is None
    options.two_words = model is None and prompt is None and getattr(options, "prompt", None) is not None
    if model is None and alone and options.model is not None and reads_as_prompt(options):
        options.model, options.prompt, options.alone = None, options.model, True
    elif model is not None and options.model is not None:
        if getattr(options, "prompt", "") is not None:
            leaf.error(f"there are two models, {options.model!r} and -m {model!r}; leave one out")
        options.prompt = options.model
    if prompt is not None and options.prompt is not None:
        leaf.error(f"there are two prompts, {options.prompt!r} and -p {prompt!r}; leave one out")
    for slot, named in (("model", model), ("prompt", prompt)):
        if named is not None:
            setattr(options, slot, named)
    if getattr(options, "model", None) == "":
        leaf.error(f"argument MODEL: {EMPTY} names no file and no folder")

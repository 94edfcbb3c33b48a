"""A single argument of a command that takes MODEL and PROMPT: which of the two it is. Imports nothing heavy."""

from __future__ import annotations

import os
import sys
from argparse import Namespace

from triforce.cli.argument_values import STANDARD

PATHS = ("/", "./", "../", "~")
LONGEST = 96  # characters of a name on the hub


def reads_as_prompt(options: Namespace) -> bool:
    """Whether the MODEL of the options, which stands alone, is the PROMPT.

    A model has the shape of a path or of a name on the hub, is known by name, or is a file or a folder that exists.
    """
    argument: str = options.model
    if argument == STANDARD:
        return True
    if names_model(argument):
        return False
    if not is_word(argument):
        return True
    # Without a prompt of another place, a word can be nothing else.
    return options.prompt_file is None and sys.stdin is not None and sys.stdin.isatty()


def names_model(argument: str) -> bool:
    """Whether an argument has the shape of a path or of a repository's name, is known, or exists."""
    if not argument or os.path.exists(os.path.expanduser(argument)):
        return bool(argument)
    if any(map(str.isspace, argument)):
        return False
    return argument.startswith(PATHS) or argument.endswith(".gguf") or _is_hub_name(argument)


def is_model(argument: str) -> bool:
    """Whether an argument can be nothing but a model: a GGUF file by its name, a name of ours, or what exists."""
    from triforce.checkpoint.model_sources import KNOWN

    return argument.endswith(".gguf") or argument in KNOWN or os.path.exists(os.path.expanduser(argument))


def is_word(argument: str) -> bool:
    """Whether an argument may be a model's name as well as a text: a word without a slash."""
    from triforce.checkpoint.hub import HUB_NAME

    return len(argument) <= LONGEST and "/" not in argument and HUB_NAME.fullmatch(argument) is not None


def _is_hub_name(argument: str) -> bool:
    """Whether an argument is a name of ours, or of a repository: its owner, a slash and its own name."""
    from triforce.checkpoint.hub import HUB_NAME
    from triforce.checkpoint.model_sources import KNOWN

    short = max(map(len, argument.split("/"))) <= LONGEST
    return argument in KNOWN or (short and "/" in argument and HUB_NAME.fullmatch(argument) is not None)

"""The model and the prompt of a command, from its arguments, a file or stdin."""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from typing import NamedTuple

from triforce.cli.options import STANDARD
from triforce.cli.streams import stdin_has_data
from triforce.cli.text_files import read_document
from triforce.distributed import spawn
from triforce.errors import RequestError

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


class AskedPrompt(NamedTuple):
    """A prompt, and the model that is named, if any. word: the prompt where it may have been meant as a model."""

    model: str | None
    prompt: str
    word: str = ""

    def tell(self, options: Namespace) -> None:
        """Say that a word was taken for the prompt, and that stdin is not read though it has data.

        Nothing is said where nothing is to be told, or another process tells it.
        """
        if getattr(options, "quiet", False) or spawn.MEETING in os.environ:
            return
        if self.word:
            told = f"{self.word!r} is taken for the PROMPT; for a model of that name: -m {self.word}"
            print(told, file=sys.stderr, flush=True)
        from_stdin = options.prompt is None and options.prompt_file in (None, STANDARD)
        if not from_stdin and stdin_has_data():
            source = "--prompt-file" if options.prompt is None else "a PROMPT"
            told = f"stdin is not read, as {source} is given; leave that out, and stdin is the prompt"
            print(told, file=sys.stderr, flush=True)


def asked_of(options: Namespace) -> AskedPrompt:
    """Return the prompt of the argument, the file or stdin, and the model. Raises RequestError."""
    if options.prompt == STANDARD and options.prompt_file is None:
        options.prompt = None
        options.prompt_file = STANDARD
    if options.prompt is not None and options.prompt_file is not None:
        raise RequestError("a PROMPT and --prompt-file are given; leave one of them out")
    if options.prompt is not None:
        if not options.prompt:
            raise RequestError("the prompt is empty; give at least one character")
        try:
            options.prompt.encode()
        except UnicodeEncodeError as error:  # how Python shows bytes of an argument that are not UTF-8
            raise RequestError("the prompt is not UTF-8 text; convert it, or use --prompt-file") from error
        word = options.prompt if options.alone and is_word(options.prompt) else ""
        return AskedPrompt(options.model, options.prompt, word)
    if options.prompt_file is None and sys.stdin.isatty():
        advice = "give it as an argument, with --prompt-file, or on stdin"
        raise RequestError(f"there is no prompt; {advice}{_taken(options.model)}")
    prompt = read_document(STANDARD if options.prompt_file is None else options.prompt_file, options)
    if prompt:
        return AskedPrompt(options.model, prompt)
    if options.prompt_file is None and options.model and is_word(options.model) and not names_model(options.model):
        return AskedPrompt(None, options.model, options.model)
    if options.prompt_file not in (None, STANDARD):
        raise RequestError(f"the prompt in {options.prompt_file} is empty; give at least one character")
    raise RequestError(f"the prompt is empty; give at least one character{_taken(options.model)}")


def _taken(model: str | None) -> str:
    """Return a remark on a MODEL that may have been meant as the prompt."""
    from triforce.checkpoint.model_sources import KNOWN

    if not model or model in KNOWN or os.path.exists(os.path.expanduser(model)):
        return ""
    missing = ", and there is no such file" if model.startswith(PATHS) or model.endswith(".gguf") else ""
    return f" ({model!r} was taken for the MODEL{missing}; as the prompt: -p {shlex.quote(model)})"

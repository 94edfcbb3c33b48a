"""Model and prompt of a command, from its arguments, a file or stdin."""

from __future__ import annotations

import os
import re
import shlex
import sys
from argparse import Namespace
from typing import NamedTuple

from triforce.cli.options import STANDARD_STREAM
from triforce.cli.streams import stdin_has_data
from triforce.cli.text_files import read_document
from triforce.distributed import spawn
from triforce.errors import RequestError

PATH_PREFIXES = ("/", "./", "../", "~")
LONGEST_NAME = 96  # characters of a name on the hub


def reads_as_prompt(options: Namespace) -> bool:
    """Whether the only positional argument, which argparse stored as MODEL, is the PROMPT.

    A model has the shape of a path or of a name on the hub, is known by name, or is a file or a folder that exists.
    """
    argument: str = options.model
    if argument == STANDARD_STREAM:
        return True
    if names_model(argument):
        return False
    if not is_word(argument):
        return True
    # No other source gives a prompt, so the word is the prompt.
    return options.prompt_file is None and sys.stdin is not None and sys.stdin.isatty()


def names_model(argument: str) -> bool:
    """Whether an argument has the shape of a path or a repository's name, is a known name, or is an existing path."""
    if not argument or os.path.exists(os.path.expanduser(argument)):
        return bool(argument)
    if any(map(str.isspace, argument)):
        return False
    return argument.startswith(PATH_PREFIXES) or argument.endswith(".gguf") or _is_hub_name(argument)


def is_word(argument: str) -> bool:
    """Whether an argument may be a model's name as well as a text: a word without a slash."""
    from triforce.checkpoint.hub import HUB_NAME

    return len(argument) <= LONGEST_NAME and "/" not in argument and HUB_NAME.fullmatch(argument) is not None


def _is_hub_name(argument: str) -> bool:
    """Whether an argument is a model name of triforce, or `owner/name` of a repository."""
    from triforce.checkpoint.hub import HUB_NAME
    from triforce.checkpoint.model_sources import KNOWN

    parts_fit = max(map(len, argument.split("/"))) <= LONGEST_NAME
    return argument in KNOWN or (parts_fit and "/" in argument and HUB_NAME.fullmatch(argument) is not None)


class AskedPrompt(NamedTuple):
    """A prompt, and the model that the arguments name, if any.

    word: the prompt, if it may have been meant as a model; else empty.
    """

    model: str | None
    prompt: str
    word: str = ""

    def print_remarks(self, options: Namespace) -> None:
        """Print to stderr that a word was taken for the prompt, and that stdin has data and is not read.

        With --quiet, and in a process that another one started, nothing is printed.
        """
        if getattr(options, "quiet", False) or spawn.MEETING in os.environ:
            return
        if self.word:
            remark = f"{self.word!r} is taken for the PROMPT; for a model of that name: -m {self.word}"
            print(remark, file=sys.stderr, flush=True)
        from_stdin = options.prompt is None and options.prompt_file in (None, STANDARD_STREAM)
        if not from_stdin and stdin_has_data():
            source = "--prompt-file" if options.prompt is None else "a PROMPT"
            remark = f"stdin is not read, as {source} is given; without it stdin is the prompt"
            print(remark, file=sys.stderr, flush=True)


def resolve_prompt(options: Namespace) -> AskedPrompt:
    """Return the model, and the prompt from the argument, the file or stdin, without the end of its last line.

    Raises RequestError.
    """
    if options.prompt == STANDARD_STREAM and options.prompt_file is None:
        options.prompt = None
        options.prompt_file = STANDARD_STREAM
    if options.prompt is not None and options.prompt_file is not None:
        raise RequestError("a PROMPT and --prompt-file are given; leave one of them out")
    if options.prompt is not None:
        if not options.prompt:
            raise RequestError("the prompt is empty; give at least one character")
        try:
            options.prompt.encode()
        except UnicodeEncodeError as error:  # Python keeps bytes of an argument that are not UTF-8 as surrogates
            advice = "write it as UTF-8, such as by `iconv -f LATIN1 -t UTF-8`"
            raise RequestError(f"the prompt is not UTF-8 text; {advice}") from error
        word = options.prompt if options.prompt_alone and is_word(options.prompt) else ""
        return AskedPrompt(options.model, options.prompt, word)
    if options.prompt_file is None and sys.stdin.isatty():
        advice = "give it as an argument, with --prompt-file, or on stdin"
        raise RequestError(f"there is no prompt; {advice}{_model_remark(options.model)}")
    text = read_document(STANDARD_STREAM if options.prompt_file is None else options.prompt_file, options)
    prompt = re.sub(r"\r?\n\Z", "", text)  # `echo` and editors end the last line, too
    if prompt:
        return AskedPrompt(options.model, prompt)
    if options.prompt_file is None and options.model and is_word(options.model) and not names_model(options.model):
        return AskedPrompt(None, options.model, options.model)
    if options.prompt_file not in (None, STANDARD_STREAM):
        raise RequestError(f"the prompt in {options.prompt_file} is empty; give at least one character")
    raise RequestError(f"the prompt is empty; give at least one character{_model_remark(options.model)}")


def _model_remark(model: str | None) -> str:
    """Return a remark on a MODEL that may have been meant as the prompt; empty for a known one and for a folder."""
    from triforce.checkpoint.model_sources import KNOWN

    if not model or model in KNOWN or os.path.isdir(os.path.expanduser(model)):
        return ""
    if os.path.exists(os.path.expanduser(model)):
        advice = "" if model.endswith(".gguf") else f"; for its text as the prompt: --prompt-file {shlex.quote(model)}"
        return f" ({model!r} was taken for the MODEL{advice})"
    missing = ", and there is no such file" if model.startswith(PATH_PREFIXES) or model.endswith(".gguf") else ""
    return f" ({model!r} was taken for the MODEL{missing}; as the prompt: -p {shlex.quote(model)})"

"""The model and the prompt of a command, from its arguments, a file or stdin."""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from typing import NamedTuple

from triforce.cli.argument_values import STANDARD
from triforce.cli.model_or_prompt import is_model, is_word, names_model
from triforce.cli.text_files import read_document
from triforce.distributed import spawn
from triforce.errors import RequestError


class AskedPrompt(NamedTuple):
    """A prompt, and the model that is named, if any. word: the prompt where it may have been meant as a model."""

    model: str | None
    prompt: str
    word: str = ""

    def tell(self, options: Namespace) -> None:
        """Say that a word was taken for the prompt, unless nothing is to be told or another process tells it."""
        if self.word and not (getattr(options, "quiet", False) or spawn.MEETING in os.environ):
            told = f"{self.word!r} is taken for the PROMPT; for a model of that name: -m {self.word}"
            print(told, file=sys.stderr, flush=True)


def asked_of(options: Namespace) -> AskedPrompt:
    """Return the prompt of the argument, the file or stdin, and the model. Raises RequestError."""
    if options.prompt == STANDARD and options.prompt_file is None:
        options.prompt, options.prompt_file = None, STANDARD
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
    if not model or is_model(model):
        return ""
    return f" ({model!r} was taken for the MODEL; as the prompt: -p {shlex.quote(model)})"

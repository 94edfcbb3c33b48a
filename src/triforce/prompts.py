"""From what users pass to what the engine takes: prompts as token ids, names that are in a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.config import ModelConfig
from triforce.errors import RequestError
from triforce.suggest import suggest

PLENTY = 16
"""Characters for each token of the context: if a text has more, its beginning may tell that it is too long."""

Prompt = str | Sequence[int]
"""Text, or token ids; arrays and tensors of ids will do."""


class Readable(Protocol):
    """Of a checkpoint what prompts are read with."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...


def one_or_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, whether one or several are given."""
    given: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    several = not isinstance(given, str) and len(given) > 0 and isinstance(given[0], Iterable)
    return list(given) if several else [given]


def token_ids(prompt: Prompt, target: Readable) -> list[int]:
    """The ids of one prompt. Raises RequestError if there are none, too many, or some that the target does not know."""
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise RequestError(f"{target.path} has no tokenizer; give the prompt as token ids")
        ids: list[Any] = _ids(prompt, target.tokenizer, target.config.context) if prompt else []
    else:
        ids = list(prompt)
    if not ids:
        raise RequestError("the prompt is empty; give at least one token of text")
    wrong = next((i for i in ids if not (isinstance(i, Integral) and 0 <= int(i) < target.config.vocab_size)), None)
    if wrong is not None:
        raise RequestError(f"token id {wrong!r} is not in the vocabulary of {target.config.vocab_size} tokens")
    if len(ids) >= (context := target.config.context):
        raise RequestError(
            f"the prompt has at least {len(ids)} tokens; with room for an answer the context of {context} holds "
            f"{context - 1}. Shorten it, or use a model with a longer context"
        )
    return [int(i) for i in ids]


def _ids(text: str, tokenizer: Tokenizer, context: int) -> list[int]:
    """All of them, or those of the beginning where they are twice what fits: a hundred megabytes take minutes."""
    beginning = text[: PLENTY * context]
    ids = tokenizer.encode(beginning)
    return ids if len(beginning) == len(text) or len(ids) > 2 * context else tokenizer.encode(text)


def known(what: str, name: str, table: Iterable[str]) -> str:
    """`name`, if it is in the table. Raises RequestError listing what is."""
    if name not in table:
        names = list(table)
        raise RequestError(f"{what} {name!r} is not known{suggest(name, names)}; choose from {', '.join(names)}")
    return name

"""Inputs of users as the engine takes them: prompts as token ids, and names that are in a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.errors import RequestError, suggest
from triforce.interface.sampling_params import SamplingParams
from triforce.model.config import ModelConfig

PLENTY = 16
"""Characters for each token of the context: of a longer text the beginning may show that it is too long."""

Prompt = str | Sequence[int]
"""A text, or token ids in a list, an array or a tensor."""


class PromptSource(Protocol):
    """A model's tokenizer and config, as prompts are read with them."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...


Message = Mapping[str, Any]
"""One turn of a conversation: role and content."""


def one_or_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts, whether one or several are given. Raises TypeError for anything else."""
    given: Any = _plain(prompts)
    several = not isinstance(given, str) and len(given) > 0 and not isinstance(given[0], Integral | float)
    return [_plain(one) for one in given] if several else [given]


def params_of_each(
    params: SamplingParams | Sequence[SamplingParams | None] | None, count: int
) -> list[SamplingParams | None]:
    """Return the parameters of each of `count` prompts, whether those of one or of each are given.

    Raises TypeError for anything else, and RequestError for another number of them.
    """
    wanted = list(params) if isinstance(params, Sequence) else [params] * count
    for one in wanted:
        if not (one is None or isinstance(one, SamplingParams)):
            given = "SamplingParams(max_tokens=3), say"
            raise TypeError(f"params is a {type(one).__name__}; pass {given}, a list of them, or None")
    if len(wanted) != count:
        raise RequestError(f"{count} prompts but {len(wanted)} sampling parameters; give one for each, or just one")
    return wanted


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """Return a list of conversations, whether one or several are given. Raises TypeError for anything else."""
    given: list[Any] = [messages] if _is_conversation(messages) else list(messages) if _is_list(messages) else []
    if not given or not all(map(_is_conversation, given)):
        raise TypeError('messages are a list such as [{"role": "user", "content": "Hello"}], or a list of such lists')
    return given


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _is_conversation(value: Any) -> bool:
    return _is_list(value) and len(value) > 0 and all(isinstance(message, Mapping) for message in value)


def _plain(prompt: Any) -> Prompt:
    """Return a text as it is, and a sequence, array or tensor as a list. Raises TypeError for anything else."""
    given: Prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(given, str) and not _is_list(given):
        raise TypeError(f"a prompt is a {type(prompt).__name__}; pass a text, a list of token ids, or a list of those")
    return given


def token_ids(prompt: Prompt, target: PromptSource) -> list[int]:
    """Token ids of one prompt. Raises RequestError if there are none, too many, or some outside the vocabulary."""
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
    """Token ids of a text, or of its beginning where these are twice what fits: a hundred megabytes take minutes."""
    beginning = text[: PLENTY * context]
    ids = tokenizer.encode(beginning)
    return ids if len(beginning) == len(text) or len(ids) > 2 * context else tokenizer.encode(text)


def known(what: str, name: str, table: Iterable[str]) -> str:
    """Return `name`, if it is in the table. Raises RequestError listing what is."""
    if name not in table:
        names = list(table)
        raise RequestError(f"{what} {name!r} is not known{suggest(name, names)}; choose from {', '.join(names)}")
    return name

"""Inputs of users, checked and converted for the engine: prompts to token ids, names of modes and options."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.engine.model_loader import Checkpoint
from triforce.engine.tier_builder import DRAFT_MODES, MODES, ModelSet
from triforce.errors import ContextLengthError, RequestError, argument, error_prefix, require_bool, suggest
from triforce.interface.messages import Message
from triforce.interface.sampling_params import SamplingParams, chat_defaults
from triforce.model.config import ModelConfig
from triforce.sampling.logits import check_bias

PROBE_CHARACTERS_PER_TOKEN = 16
"""A text with more characters than this times the context is probed first: a beginning of that length is tokenized."""

Prompt = str | Sequence[int]
"""A text, or token ids in a list, an array or a tensor."""


class PromptSource(Protocol):
    """Tokenizer and config of a model, with which prompts are read."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...


CONVERSATION_ADVICE = {
    "generate": "pass it to chat",
    "stream": "pass llm.encode_chat(messages)",
    "ask": "pass llm.encode_chat(messages)",
    "request": "pass llm.encode_chat(messages)",
    "encode": "pass it to encode_chat",
}
"""Advice to a caller that passed a conversation as a prompt, by the name of the method."""


def one_or_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts, from one prompt or a list of them. Raises TypeError for anything else."""
    plain_prompts: Any = _plain(prompts, "a prompt", CONVERSATION_ADVICE["generate"])
    if isinstance(plain_prompts, str) or (len(plain_prompts) > 0 and isinstance(plain_prompts[0], Integral | float)):
        return [plain_prompts]
    checked = [
        _plain(prompt, f"prompts[{i}]", CONVERSATION_ADVICE["generate"]) for i, prompt in enumerate(plain_prompts)
    ]
    for i, prompt in enumerate(checked):
        if _holds_several(prompt):
            raise TypeError(f"prompts[{i}] is a list of prompts; pass a text, or a list of token ids")
    return checked


def one_prompt(caller: str, prompt: Prompt) -> Prompt:
    """Return one prompt. Raises TypeError for several prompts, or anything else."""
    plain_prompt = _plain(prompt, "a prompt", CONVERSATION_ADVICE[caller])
    if _holds_several(plain_prompt):
        advice = "call it for each of these, or pass all of them to generate"
        raise TypeError(f"{caller} takes one prompt; {'join these to one text' if caller == 'ask' else advice}")
    return plain_prompt


def _holds_several(prompts: Any) -> bool:
    return not isinstance(prompts, str) and any(isinstance(part, str) or _is_list(part) for part in prompts[:1])


@contextmanager
def one_of(things: str, place: int, count: int) -> Iterator[None]:
    """Prefix the message of a TriforceError with `things[place]`, where `count` is more than one."""
    with error_prefix(f"{things}[{place}]") if count > 1 else nullcontext():
        yield


def params_of_each(
    params: SamplingParams | Sequence[SamplingParams | None] | None, count: int
) -> list[SamplingParams | None]:
    """Return the parameters of each of `count` prompts, from one set of parameters or a list of them.

    Raises TypeError for anything else, and RequestError for a list of another length.
    """
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        return [params_of_one(params, " or a list of them,")] * count
    checked = [params_of_one(entry, place=f"params[{i}]") for i, entry in enumerate(params)]
    if len(checked) != count:
        raise RequestError(
            f"{count} prompts but {len(checked)} sampling parameters; give one for each prompt, or a single one "
            "without a list"
        )
    return checked


def params_of_one(params: Any, list_advice: str = "", place: str = "params") -> SamplingParams | None:
    """Return the parameters of one prompt. Raises TypeError for anything else.

    list_advice: part of the error that says that a list is allowed.
    """
    if params is None or isinstance(params, SamplingParams):
        return params
    advice = f"pass one SamplingParams, say SamplingParams(max_tokens=3),{list_advice} or None"
    raise TypeError(f"{place} is of type {type(params).__name__}; {advice}")


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """Return a list of conversations, from one or a list of them. Raises TypeError for anything else."""
    dialogues: list[Any] = [messages] if _is_conversation(messages) or not _is_list(messages) else list(messages)
    wrong = next((i for i, dialogue in enumerate(dialogues) if not _is_conversation(dialogue)), None)
    if wrong is not None:
        place = f"conversations[{wrong}]: " if any(map(_is_conversation, dialogues)) else ""
        raise TypeError(
            f'{place}messages are a list such as [{{"role": "user", "content": "Hello"}}], or a list of such lists'
        )
    return dialogues


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _listed(value: Any) -> Any:
    """Return an array, a tensor, a list of one-number tensors or a deque as a list, and any other value unchanged."""
    if hasattr(value, "tolist") and not isinstance(value, memoryview):
        return value.tolist()
    if isinstance(value, deque) or (_is_list(value) and any(getattr(part, "shape", None) == () for part in value[:1])):
        return [_listed(part) for part in value]
    return value


def _is_conversation(value: Any) -> bool:
    return _is_list(value) and len(value) > 0 and all(isinstance(message, Mapping) for message in value)


def _plain(prompt: Any, place: str, advice: str) -> Prompt:
    """Return an array or tensor as a list, and a text or another sequence unchanged.

    advice: for a caller who passed a conversation. Raises TypeError for any other value.
    """
    listed: Prompt = _listed(prompt)
    if isinstance(listed, str):
        return listed
    turns = listed if _is_list(listed) and len(listed) else [listed]
    if all(isinstance(turn, Mapping) and "role" in turn for turn in turns):
        raise TypeError(f"{place} is a conversation; {advice}")
    if not _is_list(listed):
        raise TypeError(
            f"{place} is of type {type(prompt).__name__}; pass a text, a list of token ids, or a list of those"
        )
    return listed


def token_ids(prompt: Prompt, target: PromptSource) -> list[int]:
    """Token ids of one prompt. Raises RequestError if it has none, too many, or one outside the vocabulary."""
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise RequestError(f"{target.path} has no tokenizer; give the prompt as token ids")
        ids: list[Any] = _ids(prompt, target.tokenizer, target.config.context) if prompt else []
    else:
        ids = list(prompt)
    if not ids:
        raise RequestError("the prompt is empty; give at least one token of text")
    ids = checked_ids(ids, target.config.vocab_size)
    if len(ids) >= target.config.context:
        raise too_long(len(ids), target.config)
    return ids


def checked_ids(ids: Any, vocab_size: int) -> list[int]:
    """Return one or many token ids as a list. Raises RequestError for an id outside the vocabulary, or TypeError."""
    listed = _listed(ids)
    listed = [listed] if isinstance(listed, Integral) else listed
    if not _is_list(listed):
        raise TypeError(f"token ids are of type {type(ids).__name__}; pass a list of integers")
    for i in listed:
        if not isinstance(i, Integral) or isinstance(i, bool):
            raise TypeError(f"token id {i!r} is of type {type(i).__name__}; pass integers")
        if not 0 <= int(i) < vocab_size:
            raise RequestError(f"token id {i!r} is not in the vocabulary of {vocab_size} tokens")
    return [int(i) for i in listed]


def too_long(tokens: int, config: ModelConfig) -> ContextLengthError:
    """Return the error of a prompt of at least `tokens` tokens, which do not fit in the context."""
    return ContextLengthError(
        f"the prompt has at least {tokens} tokens; with room for an answer the context of {config.context} holds "
        f"{config.context - 1}. Shorten it, or {more_context(config)}"
    )


def more_context(config: ModelConfig) -> str:
    """Return advice on how to get a longer context."""
    if config.context < config.positions:
        return f"raise {argument('context')}, up to {config.positions}"
    return "use a model with a longer context"


def chat_ids(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, target: PromptSource) -> list[int]:
    """Return the token ids of a conversation and of the generation prompt after it. Raises RequestError."""
    if target.tokenizer is None:
        raise RequestError("this model has no tokenizer, and so no chat template; give token ids to generate")
    for message in messages:
        if isinstance(message, Mapping) and isinstance(text := message.get("content"), str):
            require_size(text, target.tokenizer, target.config)
    ids = target.tokenizer.chat(messages, tools)
    uses_tools = tools or any(message.get("tool_calls") for message in messages)
    if uses_tools and "tool" not in target.tokenizer.template:  # the template has left them out
        raise RequestError(f"this model's chat template has no tools; leave out {argument('tools')} and tool_calls")
    return ids


def require_size(text: str, tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raise RequestError for a long text with too many tokens, by its beginning alone if that suffices (see `_ids`)."""
    if len(text) > PROBE_CHARACTERS_PER_TOKEN * config.context:
        tokens = len(_ids(text, tokenizer, config.context))
        if tokens >= config.context:
            raise too_long(tokens, config)


def require_servable(params: SamplingParams, target: PromptSource) -> None:
    """Raise RequestError for stop strings if there is no tokenizer, and for tokens outside the vocabulary.

    These tokens are the stop tokens and the biased tokens.
    """
    if params.stop and target.tokenizer is None:
        raise RequestError(f"stop strings need a tokenizer; use {argument('stop_token_ids')}")
    size = target.config.vocab_size
    if unknown := [token for token in params.stop_token_ids if token >= size]:
        raise RequestError(
            f"{argument('stop_token_ids')} names token {unknown[0]}, but the vocabulary ends at {size - 1}"
        )
    check_bias([params], size)


def _ids(text: str, tokenizer: Tokenizer, context: int) -> list[int]:
    """Return the token ids of a text, or only of its beginning if that has more than 2 * `context` tokens.

    So a text of a hundred megabytes, whose tokens take minutes, is refused by its beginning. The factor of 2 is a
    margin: the cut may split a word, and the first part of a word may have more tokens than the whole word.
    """
    beginning = text[: PROBE_CHARACTERS_PER_TOKEN * context]
    ids = tokenizer.encode(beginning)
    return ids if len(beginning) == len(text) or len(ids) > 2 * context else tokenizer.encode(text)


def known(what: str, name: str, table: Iterable[str]) -> str:
    """Return `name` if it is in the table. Raises RequestError that lists the names of the table."""
    if name not in table:
        names = list(table)
        raise RequestError(f"{what} {name!r} is not known{suggest(str(name), names)}; choose from {', '.join(names)}")
    return name


class LLMInputs:
    """Part of an LLM that checks and encodes inputs, without an engine."""

    target: Checkpoint
    models: ModelSet
    tokenizer: Tokenizer | None
    sampling_defaults: dict[str, Any]

    def sampling_params(self, *, chat: bool = False, **values: Any) -> SamplingParams:
        """Return `SamplingParams` with these values. Values that are None or missing come from the model's files.

        chat: if these files set none of temperature, top_k, top_p and min_p, these are 0.8, 40, 0.95 and 0.05. Raises
        RequestError, and TypeError for a name that `SamplingParams` lacks.
        """
        require_bool("chat", chat)
        defaults = chat_defaults(self.sampling_defaults) if chat else self.sampling_defaults
        return SamplingParams(**(defaults | {name: value for name, value in values.items() if value is not None}))

    @property
    def modes(self) -> list[str]:
        """Names of the modes that these models can run."""
        return [mode for mode in MODES if self.models.has_draft or mode not in DRAFT_MODES]

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """End-of-sequence tokens of the model."""
        return frozenset(self.tokenizer.eos_ids if self.tokenizer else self.target.files.eos_ids())

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, checked. Raises RequestError."""
        return token_ids(one_prompt("encode", prompt), self.target)

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Return the token ids of a conversation and of the generation prompt after it. Raises RequestError."""
        return chat_ids(messages, tools, self.target)

    def decode(self, ids: int | Sequence[int]) -> str:
        """Return the text of token ids, or of one, without special tokens. Raises RequestError, or TypeError."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; its outputs are token ids")
        return self.tokenizer.decode(checked_ids(ids, self.target.config.vocab_size))

"""Inputs of an LLM by its models: token ids of texts and chats, texts of token ids, modes and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.engine.inputs import Prompt, chat_ids, checked_ids, one_prompt, token_ids
from triforce.engine.llm_lifetime import LLMLifetime
from triforce.engine.model_loader import Checkpoint
from triforce.engine.modes import DRAFTED, MODES
from triforce.engine.tier_builder import ModelSet
from triforce.errors import RequestError, require_bool
from triforce.interface.messages import Message
from triforce.interface.sampling_params import SamplingParams, chat_defaults


class LLMInputs(LLMLifetime):
    """Part of an LLM that reads what is asked of it, and needs no engine."""

    target: Checkpoint
    models: ModelSet
    tokenizer: Tokenizer | None
    sampling_defaults: dict[str, Any]

    def sampling_params(self, *, chat: bool = False, **given: Any) -> SamplingParams:
        """Return `SamplingParams` with these values, and of the others (None) those that the model's files name.

        chat: where these name none, they are temperature 0.8, top_k 40, top_p 0.95, min_p 0.05. Raises RequestError.
        """
        require_bool("chat", chat)
        defaults = chat_defaults(self.sampling_defaults) if chat else self.sampling_defaults
        return SamplingParams(**(defaults | {name: value for name, value in given.items() if value is not None}))

    @property
    def modes(self) -> list[str]:
        """Names of the modes that these models can run."""
        return [mode for mode in MODES if self.models.drafts or mode not in DRAFTED]

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """End-of-sequence tokens of the model."""
        return frozenset(self.tokenizer.eos_ids if self.tokenizer else self.target.files.eos_ids())

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, checked. Raises RequestError."""
        return token_ids(one_prompt("encode", prompt), self.target)

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Return the token ids of a conversation that awaits its answer. Raises RequestError."""
        return chat_ids(messages, tools, self.target)

    def decode(self, ids: int | Sequence[int]) -> str:
        """Return the text of token ids, or of one, without special tokens. Raises RequestError, or TypeError."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; its outputs are token ids")
        return self.tokenizer.decode(checked_ids(ids, self.target.config.vocab_size))

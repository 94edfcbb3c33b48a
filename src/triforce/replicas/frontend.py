"""Messages of a replica: a frontend without weights, which parses requests, and the events of answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.engine.inputs import Prompt, PromptSource, token_ids
from triforce.errors import ModelError
from triforce.interface.explain import BreakEvenPoint
from triforce.llm import LLM
from triforce.model.config import ModelConfig
from triforce.model.rope import Rope
from triforce.server.engine_client import Event
from triforce.structured_output.compiler import GrammarCompiler


@dataclass(frozen=True, slots=True)
class ReplicaMessage:
    """A message about a request. The first one, without an event, acknowledges it. Expected errors are events."""

    replica: str
    kv_tokens: int
    """Tokens whose K and V the replica holds."""
    event: Event | Exception | None = None
    waited: float = 0.0
    """Seconds in the replica's own queue."""


@dataclass(frozen=True)
class ReplicaFrontend:
    """The members of LLM that the parsing of requests needs (see `ServedModel`)."""

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    modes: list[str]
    mode: str
    coupling: str
    sampling_defaults: dict[str, Any]
    break_even_point: BreakEvenPoint
    """The break-even point at the start of the replica."""
    fingerprint: str

    @classmethod
    def of(cls, llm: LLM) -> ReplicaFrontend:
        """Return the frontend of a model. Raises ModelError for one without a tokenizer."""
        if llm.tokenizer is None:
            raise ModelError(
                "this model has no tokenizer, and a server of text needs one; put it into the model's folder"
            )
        rope = llm.target.config.rope
        # The frontend is pickled. A new Rope drops cached tables.
        config = replace(llm.target.config, rope=Rope(rope.inv_freq_RF, rope.scale))
        model_facts = llm.modes, llm.mode, llm.coupling, llm.sampling_defaults, llm.break_even(), llm.fingerprint
        return cls(llm.target.path, config, llm.tokenizer, *model_facts)

    @property
    def target(self) -> PromptSource:
        return self

    def encode(self, prompt: Prompt) -> list[int]:
        """Return token ids of a prompt, checked. Raises RequestError."""
        return token_ids(prompt, self)

    def break_even(self) -> BreakEvenPoint:
        """Return the context from which on speculation pays."""
        return self.break_even_point

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiler of grammars in tokens of the replicas' model."""
        return GrammarCompiler(self.tokenizer)

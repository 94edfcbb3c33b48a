"""What requests are read with where no model is: a replica makes it of its own, so the server needs no weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.engine.inputs import Prompt, token_ids
from triforce.errors import ModelError
from triforce.interface.grammar import Grammar
from triforce.llm import LLM
from triforce.model.config import ModelConfig
from triforce.model.rope import Rope
from triforce.sampling import Constraint
from triforce.structured_output.compiler import Grammars


@dataclass(frozen=True, slots=True)
class WeightlessModel:
    """A model without its weights."""

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer


@dataclass(frozen=True)
class ReplicaFrontend:
    """Of an LLM what `server` reads requests with, each member as there."""

    target: WeightlessModel
    modes: list[str]
    sampling_defaults: dict[str, Any]

    @classmethod
    def of(cls, llm: LLM) -> ReplicaFrontend:
        """Raises ModelError for a model without a tokenizer."""
        if llm.tokenizer is None:
            raise ModelError("this model has no tokenizer, and a server of text needs one; put it into its folder")
        rope = llm.target.config.rope
        # It travels to where there may be no such device, and without the tables that it has grown.
        config = replace(llm.target.config, rope=Rope(rope.inv_freq_F.cpu(), rope.scale))
        return cls(WeightlessModel(llm.target.path, config, llm.tokenizer), llm.modes, llm.sampling_defaults)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.target.tokenizer

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked. Raises RequestError."""
        return token_ids(prompt, self.target)

    def follow(self, grammar: Grammar) -> Constraint:
        """What holds one text to a grammar. Raises RequestError for one that cannot be compiled."""
        return self._grammars.follow(grammar)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer)

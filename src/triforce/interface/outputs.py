"""Outputs of the engine. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from triforce.interface.explain import (
    Explanation,
    PlanReport,
    PlanSegment,
    TierStats,
    explain,
    json_value,
    proposals_by_plan,
    total,
)
from triforce.interface.frozen_fields import fields_frozen


class Logprob(NamedTuple):
    """A token and the natural logarithm of its probability."""

    token_id: int  # below the vocabulary's size
    logprob: float  # at most 0; by the raw logits, before temperature, penalties, filters and grammar
    text: str = ""
    """Text of the token by itself, where there is a tokenizer. Bytes that are no whole character read as `<0xF0>`."""


class TokenLogprobs(NamedTuple):
    """The token at one position, and the most probable tokens there, best first."""

    chosen: Logprob  # the sampled token, or the token of the prompt
    top: tuple[Logprob, ...] = ()  # as long as the `logprobs` or `prompt_logprobs` of the request


@fields_frozen
@dataclass(frozen=True, slots=True)
class DecodingSnapshot:
    """State of the decoding of one text."""

    tokens: int  # committed, the prompt included
    seconds: float  # of decoding
    seen: list[int]  # of each part of the text, the percentage that the retrieval tier reads; empty if it is not in use
    tiers: list[TierStats]  # so far, from the lowest to the full tier


@fields_frozen
@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the `n` continuations."""

    index: int  # which of the n
    text: str  # new text only
    token_ids: list[int]  # new tokens only
    finish_reason: Literal["stop", "length"]  # "stop": end of sequence or a stop text; "length": a limit
    logprobs: list[TokenLogprobs] | None  # one per new token
    origins: list[str]  # name of the tier that proposed each new token
    seed: int  # of the sampling noise; drawn where the request has none
    tiers: list[TierStats]  # from the lowest to the full tier
    timeline: list[PlanSegment] = field(default_factory=list)  # plans of mode auto in order
    report: PlanReport | None = None  # estimates of mode auto at its last planning
    stop_string: str | None = None  # the stop string that ended the text

    @property
    def plans(self) -> dict[str, int]:
        """Number of proposals of the full tier by plan of mode auto."""
        return proposals_by_plan(self.timeline)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields in the types of JSON. The logarithm of a probability of zero becomes None."""
        return dict(json_value(self))


@fields_frozen
@dataclass(frozen=True, slots=True)
class KVMemoryUsage:
    """Bytes of KV on the compute device, offloaded to host memory, and offloaded to a file."""

    device_bytes: int = 0  # on the compute device
    host_bytes: int = 0  # offloaded to host memory
    file_bytes: int = 0  # offloaded to a file


@fields_frozen
@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The outputs of one prompt. Times are in seconds.

    Its `str` is empty, as the last event of a stream adds no text to its chunks: the text is `outputs[0].text`.
    """

    prompt_token_ids: list[int]  # as the prompt was read
    prompt_logprobs: list[TokenLogprobs | None] | None  # one per prompt token; the first is None
    outputs: list[CompletionOutput]  # the n continuations
    mode: str  # selects the tiers
    coupling: str  # how draft tokens were verified
    exactness: Literal["bitwise", "distribution"]
    """`bitwise`: a seed gives the text of plain decoding; `distribution`: only the distribution is the same."""
    prefill_seconds: float  # of reading the prompt
    decode_seconds: float  # after the prefill
    kv: KVMemoryUsage = KVMemoryUsage()  # of the target
    kv_dtype: str = "bfloat16"  # of the target's keys and values
    weight_inputs: str = "int16"  # rounding of the inputs of products with packed weights
    cached_tokens: int = 0
    """Prompt tokens whose KV was cached."""
    reread: str = ""
    """Reason why the cache held no more of the prompt; empty where hardly any tokens were read."""
    prompt: str | None = None
    """The prompt text; None for token ids or a chat."""

    def __str__(self) -> str:
        """Return an empty text: the last event of a stream adds none to its chunks."""
        return ""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def completion_tokens(self) -> int:
        """New tokens, of all outputs together."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def tiers(self) -> list[TierStats]:
        """Statistics of each tier for all outputs together, from the lowest to the full tier."""
        return total(output.tiers for output in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        """New tokens, of all outputs together, per second of decoding; 0 if no time was measured."""
        return self.completion_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and outputs in the types of JSON. The logarithm of a probability of zero becomes None."""
        return dict(json_value(self))

    def explain(self) -> Explanation:
        """Explain the speed: cost and yield of each tier, plans over time, and advice."""
        return explain(
            self.mode,
            self.prompt_tokens,
            [output.timeline for output in self.outputs],
            self.tiers,
            [len(output.token_ids) for output in self.outputs],
            (self.prefill_seconds, self.decode_seconds),
            self.outputs[0].report,
        )


class Interruption(KeyboardInterrupt):
    """An interrupt of `LLM.generate` or `LLM.chat`. It holds the finished outputs.

    outputs: one for each prompt; None for an unfinished prompt. In a notebook they are `sys.last_value.outputs`.
    """

    def __init__(self, outputs: list[RequestOutput | None]) -> None:
        done = sum(output is not None for output in outputs)
        super().__init__(f"{done} of {len(outputs)} prompts are done; `outputs` of this exception holds their outputs")
        self.outputs = outputs

"""What may be sent. A field that is not known here, and would change the answer, is refused; null is the default.

Numbers are only typed here: `triforce.request.SamplingParams` says which of them can be served.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from triforce.server.limits import ANSWER_TOKENS, COMPLETION_TOKENS

Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Batches = Annotated[list[Ids], Field(fail_fast=True)]

HARMLESS = {"user", "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"}
"""Fields that never change what is generated here, with whatever value."""

_LATER = "is not supported yet; leave it out"
_TOOLS = "tools cannot be called yet; leave it out, and describe in the messages what you need"
UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "audio": ((None,), "this is a text model; leave it out"),
    "background": ((None, False), "nothing is kept here; leave it out"),
    "best_of": ((None, 1), "leave it out; n gives that many choices"),
    "conversation": ((None,), "nothing is kept here; send the whole conversation as input"),
    "function_call": ((None, "none", "auto"), _TOOLS),
    "functions": ((None, []), _TOOLS),
    "include": ((None, []), _LATER),
    "max_tool_calls": ((None,), _TOOLS),
    "modalities": ((None, ["text"]), "this is a text model; leave it out"),
    "parallel_tool_calls": ((None, True, False), _TOOLS),
    "prediction": ((None,), "leave it out; guesses are made here anyway"),
    "previous_response_id": ((None,), "nothing is kept here; send the whole conversation as input"),
    "prompt": ((None,), "prompts are not kept here; send their text"),
    "reasoning": ((None, {}), _LATER),
    "reasoning_effort": ((None,), _LATER),
    "response_format": ((None, {"type": "text"}), _LATER),
    "store": ((None, False), "nothing is kept here; leave it out, or send false"),
    "suffix": ((None, ""), "nothing can be inserted before a suffix; leave it out"),
    "text": ((None, {}, {"format": {"type": "text"}}), _LATER),
    "tool_choice": ((None, "none", "auto"), _TOOLS),
    "tools": ((None, []), _TOOLS),
    "top_logprobs": ((None, 0), _LATER),
    "truncation": ((None, "disabled"), "prompts are not cut here; shorten it yourself and leave this out"),
    "verbosity": ((None,), _LATER),
    "web_search_options": ((None,), _TOOLS),
}
"""Fields of OpenAI's that are served with these values only, and what to do instead of others."""


class Body(BaseModel):
    """A JSON object whose every field means something."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_be_ignored(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in data.keys() - cls.model_fields.keys() - HARMLESS:
            neutral, advice = UNSUPPORTED.get(name, ((), "there is no such field here; leave it out"))
            if data[name] not in neutral:
                shown = {"field": ascii(name[:60])[1:-1], "advice": advice}
                raise PydanticCustomError("unknown_field", "{field}: {advice}", shown)
        return {name: value for name, value in data.items() if name in cls.model_fields}


class Named(Body):
    """A request to a model: the one that is served, if named at all."""

    model: str | None = None


class Sampled(Named):
    """How a text is sampled. After `stream` stand extensions of triforce's."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    mode: str | None = Field(None, description="Which tiers: a value of --mode")
    tier_stats: bool | None = Field(None, description="Report what each tier did, and which proposed each token")


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Choices(Sampled):
    """What text and chat completions share."""

    n: int | None = None
    stop: str | Texts | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = Field(None, description="Token id to what is added to its logit")
    max_tokens: int | None = Field(None, description=f"Default: {COMPLETION_TOKENS}, in a chat {ANSWER_TOKENS}")
    stream_options: StreamOptions | None = None


class CompletionBody(Choices):
    """POST /v1/completions."""

    prompt: str | Ids | Texts | Batches
    echo: bool | None = None
    logprobs: int | None = Field(None, description="Alternatives listed at each token; with echo, of the prompt too")


class TextPart(Body):
    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Message(Body):
    """One turn of a conversation. What an answer of ours has beside its text may be sent back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class ChatBody(Choices):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, description=f"Default: {ANSWER_TOKENS}")
    logprobs: bool | None = None
    top_logprobs: int | None = None


class Item(Message):
    """One turn of a conversation, as /v1/responses has it."""

    type: Literal["message"] | None = None
    id: str | None = None
    status: str | None = None


class ResponsesBody(Sampled):
    """POST /v1/responses, without anything kept between requests."""

    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, description=f"Default: {ANSWER_TOKENS}")


class TokenizeBody(Named):
    """POST /tokenize: a text or a conversation."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Named):
    """POST /detokenize."""

    tokens: Ids

"""What may be sent. Null is the default of every field.

Numbers are only typed here: `triforce.request.SamplingParams` says which of them can be served.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from triforce.server.fields import Batches, Body, Ids, Texts
from triforce.server.formats import ResponseFormat, TextOptions
from triforce.server.limits import ANSWER_TOKENS, COMPLETION_TOKENS
from triforce.server.tools import MOST_TOOLS, OneTool, Tool, ToolCall


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
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    look: bool | None = Field(None, description="Stream where decoding stands, and how long each token is (triforce's)")


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


class ChatMessage(Message):
    """One turn of a chat: calls of functions, and what they gave, are turns too."""

    role: Literal["system", "developer", "user", "assistant", "tool"]  # type: ignore[assignment]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None  # type: ignore[assignment]
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _say_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("no_content", "content is required where there are no tool_calls")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("calls", "tool_calls are the assistant's")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise PydanticCustomError("tool", "role tool and tool_call_id belong together")
        return self


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


class ChatBody(Choices):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, description=f"Default: {ANSWER_TOKENS}")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | OneTool | None = None
    parallel_tool_calls: bool | None = None


class Item(Message):
    """One turn of a conversation, as /v1/responses has it."""

    type: Literal["message"] | None = None
    id: str | None = None
    status: str | None = None


class ResponsesBody(Sampled):
    """POST /v1/responses, without anything kept between requests."""

    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    text: TextOptions | None = None
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

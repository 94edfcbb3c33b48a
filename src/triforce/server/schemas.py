"""Request bodies. Null is the default of every field.

Numbers are only typed here: `triforce.interface.sampling_params.SamplingParams` says which of them can be served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from triforce.server.limits import ANSWER_TOKENS, COMPLETION_TOKENS
from triforce.server.message_bodies import InputItems, Item, Messages
from triforce.server.request_base import NO_LOGPROBS, Batches, Biases, Body, Ids, Stops, Texts, unknown_field
from triforce.server.response_formats import FlatResponseFormat, ResponseFormat
from triforce.server.sampling_fields import ModelField, SamplingFields, StreamOptions, ThinkingField
from triforce.server.tools import MOST_TOOLS, FlatTool, OneFlatTool, OneTool, Tool, ToolChoice, ToolFields, choose_tools

CUT = "A text ends with the context, whatever is asked for: finish_reason length"
"""Of the field that bounds an answer."""
LOGPROBS = "message.output_text.logprobs"
"""What `include` of responses calls log-probabilities."""


class TextOptions(Body):
    """`text` of responses."""

    called: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("grammar", "json_schema", "name", "regex", "schema", "strict", "type"), "it stands in format here"
    )
    format: FlatResponseFormat | None = None


class CompletionFields(SamplingFields):
    """Fields that text and chat completions share."""

    n: int | None = None
    stop: str | Stops | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = Field(None, description="Token id to what is added to its logit")
    max_tokens: int | None = Field(None, description=f"Default: {COMPLETION_TOKENS}, in a chat {ANSWER_TOKENS}. {CUT}")
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    trace: bool | None = Field(None, description="Stream how far it has come, and how long each token is (triforce's)")
    return_progress: bool | None = Field(None, description="Stream how far the prompt is read (llama.cpp's)")

    @property
    def output_format(self) -> str | None:
        return "response_format" if self.response_format and self.response_format.type != "text" else None


class CompletionBody(CompletionFields):
    """POST /v1/completions."""

    called: ClassVar[Mapping[str, str]] = {"messages": "/v1/chat/completions takes it; send prompt here"}
    prompt: str | Ids | Texts | Batches
    echo: bool | None = None
    logprobs: int | None = Field(None, description="Alternatives listed at each token; with echo, of the prompt too")

    @property
    def sent_as(self) -> Mapping[str, str]:
        return {"prompt_logprobs": "logprobs"}

    @property
    def scored_only(self) -> bool:
        return self.max_tokens == 0


class ChatBody(ToolFields, ThinkingField, CompletionFields):
    """POST /v1/chat/completions."""

    called: ClassVar[Mapping[str, str]] = dict.fromkeys(("input", "prompt"), "send messages here")
    prompt_field: ClassVar[str] = "messages"
    messages: Messages
    max_completion_tokens: int | None = Field(None, description="Newer name of max_tokens; it wins where both are sent")
    logprobs: bool | None = Field(None, description="Whether log-probabilities of new tokens are told")
    top_logprobs: int | None = Field(None, description="Alternatives listed at each of them")
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | OneTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def sent_as(self) -> Mapping[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"max_tokens": limit, "logprobs": "top_logprobs"}

    def choose_tools(self, template: str) -> ToolChoice | None:
        """Return the tools that the answer may call. Raises ApiError or RequestError."""
        choice = self.tool_choice.function if isinstance(self.tool_choice, OneTool) else self.tool_choice
        spoken = any(message.tool_calls or message.role == "tool" for message in self.messages)
        functions = [tool.function for tool in self.tools or ()]
        several, form = self.parallel_tool_calls is not False, self.output_format
        return choose_tools(template, functions, choice, several=several, spoken=spoken, output_format=form)


class ResponsesBody(ToolFields, ThinkingField, SamplingFields):
    """POST /v1/responses, without anything kept between requests."""

    called: ClassVar[Mapping[str, str]] = {"messages": "is called input here"}
    prompt_field: ClassVar[str] = "input"
    input: str | InputItems
    instructions: str | None = None
    text: TextOptions | None = None
    max_output_tokens: int | None = Field(None, description=f"Default: {ANSWER_TOKENS}. {CUT}")
    stream_options: StreamOptions | None = None
    tools: Annotated[list[FlatTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | OneFlatTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_log_probabilities(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        included = data.get("include") if isinstance(data, dict) else None
        if isinstance(included, list) and LOGPROBS in included:
            raise unknown_field("include", f"{LOGPROBS}: {NO_LOGPROBS}")
        return handler(data)

    @property
    def sent_as(self) -> Mapping[str, str]:
        return {"max_tokens": "max_output_tokens"}

    @property
    def output_format(self) -> str | None:
        return "text" if self.text and self.text.format and self.text.format.type != "text" else None

    def choose_tools(self, template: str) -> ToolChoice | None:
        """Return the tools that the answer may call. Raises ApiError or RequestError."""
        spoken = not isinstance(self.input, str) and not all(isinstance(item, Item) for item in self.input)
        several, choice, form = self.parallel_tool_calls is not False, self.tool_choice, self.output_format
        return choose_tools(template, self.tools or [], choice, several=several, spoken=spoken, output_format=form)


class TokenizeBody(ThinkingField, ModelField):
    """POST /tokenize: a text or a conversation."""

    called: ClassVar[Mapping[str, str]] = dict.fromkeys(("content", "input", "text"), "is called prompt here")
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(ModelField):
    """POST /detokenize."""

    called: ClassVar[Mapping[str, str]] = dict.fromkeys(("ids", "prompt", "token_ids"), "is called tokens here")
    tokens: Ids

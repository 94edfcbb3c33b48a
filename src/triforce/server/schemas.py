"""Request bodies. Null is the default of every field.

Numbers are only typed here: `triforce.interface.sampling_params.SamplingParams` says which of them can be served.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from triforce.interface.grammar import Grammar
from triforce.server.limits import ANSWER_TOKENS, COMPLETION_TOKENS
from triforce.server.message_bodies import InputItems, Item, Messages
from triforce.server.request_base import Batches, Biases, Body, CacheFields, Ids, StopIds, Stops, Texts
from triforce.server.tools import MOST_TOOLS, FlatTool, OneFlatTool, OneTool, Tool, ToolChoice, choose_tools


class TextFormat(Body):
    """Anything."""

    type: Literal["text"]


class JsonFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaSpec(Body):
    """A JSON schema. It is always kept to, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")


class SchemaFormat(Body):
    """JSON that a schema describes, as chats have it."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaSpec


class FlatSchemaFormat(JsonSchemaSpec):
    """The same as responses have it."""

    type: Literal["json_schema"]


class GrammarFormat(Body):
    """A text that a grammar in llguidance's dialect of Lark derives."""

    type: Literal["grammar"]
    lark: str = Field(alias="grammar")


class RegexFormat(Body):
    """A text that a regular expression matches as a whole: an extension of triforce's."""

    type: Literal["regex"]
    regex: str


_BY_TYPE = Field(discriminator="type")
ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat | GrammarFormat | RegexFormat, _BY_TYPE]
FlatResponseFormat = Annotated[TextFormat | JsonFormat | FlatSchemaFormat | GrammarFormat | RegexFormat, _BY_TYPE]


class TextOptions(Body):
    """`text` of responses."""

    format: FlatResponseFormat | None = None


def grammar_of(form: ResponseFormat | FlatResponseFormat | None) -> Grammar | None:
    """Return the grammar of a format, or None for no constraint. Raises RequestError."""
    match form:
        case JsonFormat():
            return Grammar.json()
        case SchemaFormat():
            return Grammar.json(form.json_schema.json_schema)
        case FlatSchemaFormat():
            return Grammar.json(form.json_schema)
        case GrammarFormat():
            return Grammar.lark(form.lark)
        case RegexFormat():
            return Grammar.regex(form.regex)
    return None


class ModelField(Body):
    """A request to a model: the one that is served, if named at all."""

    model: str | None = None


class SamplingFields(CacheFields, ModelField):
    """Sampling parameters. Fields after `stream` are extensions of triforce's."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    mode: str | None = Field(None, description="Which tiers: a value of --mode")
    tier_stats: bool | None = Field(None, description="Report what each tier did, and which proposed each token")


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class CompletionFields(SamplingFields):
    """Fields that text and chat completions share."""

    n: int | None = None
    stop: str | Stops | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = Field(None, description="Token id to what is added to its logit")
    max_tokens: int | None = Field(None, description=f"Default: {COMPLETION_TOKENS}, in a chat {ANSWER_TOKENS}")
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    trace: bool | None = Field(None, description="Stream how far it has come, and how long each token is (triforce's)")
    return_progress: bool | None = Field(None, description="Stream how far the prompt is read (llama.cpp's)")


class CompletionBody(CompletionFields):
    """POST /v1/completions."""

    prompt: str | Ids | Texts | Batches
    echo: bool | None = None
    logprobs: int | None = Field(None, description="Alternatives listed at each token; with echo, of the prompt too")


class ChatBody(CompletionFields):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, description=f"Default: {ANSWER_TOKENS}")
    logprobs: bool | None = Field(None, description="Whether log-probabilities of new tokens are told")
    top_logprobs: int | None = Field(None, description="Alternatives listed at each of them")
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | OneTool | None = None
    parallel_tool_calls: bool | None = None

    def choose_tools(self, template: str) -> ToolChoice | None:
        """Return the tools that the answer may call. Raises ApiError or RequestError."""
        choice = self.tool_choice.function if isinstance(self.tool_choice, OneTool) else self.tool_choice
        spoken = any(message.tool_calls or message.role == "tool" for message in self.messages)
        output_format = "response_format" if self.response_format and self.response_format.type != "text" else None
        functions = [tool.function for tool in self.tools or ()]
        several = self.parallel_tool_calls is not False
        return choose_tools(template, functions, choice, several=several, spoken=spoken, output_format=output_format)


class ResponsesBody(SamplingFields):
    """POST /v1/responses, without anything kept between requests."""

    input: str | InputItems
    instructions: str | None = None
    text: TextOptions | None = None
    max_output_tokens: int | None = Field(None, description=f"Default: {ANSWER_TOKENS}")
    tools: Annotated[list[FlatTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | OneFlatTool | None = None
    parallel_tool_calls: bool | None = None

    def choose_tools(self, template: str) -> ToolChoice | None:
        """Return the tools that the answer may call. Raises ApiError or RequestError."""
        spoken = not isinstance(self.input, str) and not all(isinstance(item, Item) for item in self.input)
        form = self.text.format if self.text else None
        output_format = "text" if form and form.type != "text" else None
        several, choice = self.parallel_tool_calls is not False, self.tool_choice
        return choose_tools(
            template, self.tools or [], choice, several=several, spoken=spoken, output_format=output_format
        )


class TokenizeBody(ModelField):
    """POST /tokenize: a text or a conversation."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(ModelField):
    """POST /detokenize."""

    tokens: Ids

"""Request bodies. Null is the default of every field.

This module checks the types of numbers only; `triforce.interface.sampling_params.SamplingParams` checks their range.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from triforce.interface.grammar import Grammar
from triforce.interface.messages import REPLAYED_FIELDS, ROLES, TEXT_PART_FIELDS, TEXT_PART_TYPES
from triforce.server.errors import field_error
from triforce.server.limits import ANSWER_TOKENS, COMPLETION_TOKENS, MAX_CALLS, MAX_MESSAGES, MAX_PARTS
from triforce.server.request_base import (
    NO_LOGPROBS,
    Batches,
    Biases,
    Body,
    CacheFields,
    Ids,
    StopIds,
    Stops,
    Texts,
    unknown_field,
)
from triforce.server.tools import (
    MAX_TOOLS,
    FlatTool,
    OneFlatTool,
    OneTool,
    Tool,
    ToolChoice,
    ToolFields,
    check_size,
    choose_tools,
)

TEMPLATE_VARIABLES = frozenset({"add_generation_prompt", "continue_final_message", "documents", "messages", "tools"})
"""Variables of chat templates that a request sets by other fields, or that are not supported."""
_WORDS = re.compile(r"\w+")
MAX_ARGUMENTS = 2**18
"""Maximal length of a call's arguments in characters."""
Part = dict[str, Any]
"""A part of a turn's content. Only text parts are supported."""
Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]


Arguments = Annotated[
    str,
    Field(description="A JSON object; an empty text stands for an object without fields", max_length=MAX_ARGUMENTS),
    AfterValidator(lambda text: text if text.strip() else "{}"),
]


CalledName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,64}$")]
"""Name of a function that a model called, which may be none of the request's."""


class CalledFunction(Body):
    tolerant: ClassVar[bool] = True
    name: CalledName
    arguments: Arguments


class ToolCall(Body):
    """A tool call of an earlier answer."""

    tolerant: ClassVar[bool] = True
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """A turn of a conversation. Fields of this server's own answers are accepted."""

    field_advice: ClassVar[Mapping[str, str]] = {
        "function_call": 'send a call in tool_calls: [{"id": ..., "type": "function", '
        '"function": {...}}], and its result in a turn of role tool',
        "thinking": "send it beside messages, as a field of the request",
    }
    skipped: ClassVar[Collection[str]] = REPLAYED_FIELDS
    role: str = Field(description=", ".join(ROLES))
    content: str | Parts = Field(description=f"parts are `{{type, text}}`, of type {', '.join(TEXT_PART_TYPES)}")
    annotations: list[Any] | None = Field(default=None, description="Ignored, as a part of an earlier answer")
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    @classmethod
    def tolerates(cls, data: Mapping[str, Any]) -> bool:
        """Turns of the assistant and of tools are sent back as clients stored them."""
        return data.get("role") in ("assistant", "tool")

    @model_validator(mode="after")
    def _drop_client_fields(self) -> Self:
        """Drop what clients add to text parts, such as marks for a cache. Other parts are refused by their type."""
        if isinstance(self.content, list):
            parts = [{name: value for name, value in part.items() if value is not None} for part in self.content]
            texts = [part for part in parts if part.get("type") in TEXT_PART_TYPES]
            added_names = {name for part in texts for name in part.keys() - TEXT_PART_FIELDS}
            self.ignore(*(f"content.{name}" for name in added_names))
            for part in texts:
                for name in part.keys() - TEXT_PART_FIELDS:
                    del part[name]
            self.content = parts
        return self


class ChatMessage(Message):
    """A turn of a chat. Tool calls and their results are turns too."""

    content: str | Parts | None = Field(default=None, description="A text, or parts of it")  # type: ignore[assignment]
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = Field(
        default=None, description="Calls of an assistant's turn"
    )
    tool_call_id: str | None = Field(default=None, description="The call that a turn of role tool answers")
    name: str | None = Field(default=None, description="Of the speaker or the function; a template may show it")
    reasoning_content: Any = Field(default=None, description="Thoughts of an earlier answer; a template may show them")

    refusal: str | None = Field(default=None, description="The text of an earlier answer without content")

    @model_validator(mode="after")
    def _require_call_id(self) -> Self:
        if self.content is None:
            self.content = self.refusal
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError("tool", "role tool needs the tool_call_id of the call that it answers")
        return self


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ItemMeta(Body):
    """Fields of an answer's item that are ignored when the item is sent back."""

    tolerant: ClassVar[bool] = True
    id: str | None = Field(default=None, description="Ignored")
    status: str | None = Field(default=None, description="Ignored")


class Item(Message, ItemMeta):
    """A turn of a conversation, in the form of /v1/responses."""

    role: Literal["system", "developer", "user", "assistant"]
    type: Literal["message"] | None = None


class CallItem(ItemMeta):
    """A tool call of an earlier answer. It belongs to the preceding assistant turn, if there is one."""

    type: Literal["function_call"]
    call_id: str
    name: CalledName
    arguments: Arguments


class ResultItem(ItemMeta):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class ReasoningItem(ItemMeta):
    """Thoughts of an earlier answer. They belong to the assistant turn or the call that follows."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: list[Any] | None = None

    @property
    def text(self) -> str:
        """The thoughts as text."""
        parts = [*(self.content or self.summary or ())]
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))


def _item_type(item: Any) -> Any:
    return (item.get("type") if isinstance(item, dict) else getattr(item, "type", None)) or "message"


InputItem = Annotated[
    Annotated[Item, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="item_type",
        custom_error_message="an item is a message, a reasoning, a function_call or a function_call_output",
    ),
]
InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def messages_of(instructions: str | None, items: str | Sequence[InputItem]) -> list[Message]:
    """Return the messages of a response's instructions and input.

    Function calls and thoughts become part of their assistant turns.
    """
    messages: list[Message] = [Message(role="system", content=instructions)] if instructions else []
    if isinstance(items, str):
        return [*messages, Message(role="user", content=items)]
    thoughts = ""
    for item in items:
        if isinstance(item, ReasoningItem):
            thoughts = item.text
            continue
        if isinstance(item, Item):
            messages.append(ChatMessage(role=item.role, content=item.content) if item.role == "assistant" else item)
        elif isinstance(item, CallItem):
            _add_call(messages, item)
        else:
            messages.append(ChatMessage(role="tool", content=item.output, tool_call_id=item.call_id))
        if thoughts and isinstance(messages[-1], ChatMessage) and messages[-1].role == "assistant":
            messages[-1].reasoning_content = thoughts
        thoughts = ""
    if not messages:
        raise field_error("input", "input has no message; send a text, or a turn of the user")
    return messages


def _add_call(messages: list[Message], item: CallItem) -> None:
    """Add a call to the last assistant message, or as a new message where the last one has another role."""
    call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
    last_message = messages[-1] if messages else None
    if not isinstance(last_message, ChatMessage) or last_message.role != "assistant":
        last_message = ChatMessage(role="assistant")
        messages.append(last_message)
    last_message.tool_calls = [*(last_message.tool_calls or ()), call]


def message_length(message: Message) -> int:
    """Return the length in characters of a message's content and name, and of its calls' arguments."""
    content = message.content or ""
    length = len(content) if isinstance(content, str) else sum(len(str(part.get("text", ""))) for part in content)
    length += len(getattr(message, "name", None) or "")
    length += len(thoughts) if isinstance(thoughts := getattr(message, "reasoning_content", None), str) else 0
    return length + sum(len(call.function.arguments) for call in message.tool_calls or ())


def message_dict(message: Message, template: str) -> dict[str, Any]:
    """Return a message in the form that `interface.messages` reads. template: the chat template."""
    names = {"role", "content", "tool_calls", "tool_call_id", "name"}
    if "reasoning_content" in template and isinstance(getattr(message, "reasoning_content", None), str):
        names.add("reasoning_content")
    return message.model_dump(include=names)


class TextFormat(Body):
    """Text without a constraint."""

    type: Literal["text"]


class JsonFormat(Body):
    """Any JSON object."""

    field_advice: ClassVar[Mapping[str, str]] = {
        "schema": "send type json_schema, with the schema in json_schema.schema"
    }
    type: Literal["json_object"]


_FLAT_EXAMPLE = '{"type": "json_schema", "name": ..., "schema": {...}}'
_NESTED_EXAMPLE = '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
_SCHEMA_KEYWORDS = (
    *("$defs", "$ref", "$schema", "additionalProperties", "allOf", "anyOf", "const", "definitions", "enum", "items"),
    *("oneOf", "properties", "required", "title", "type"),
)
"""Keywords of JSON schemas. A body holds them if a client sends a schema in the wrong place."""


class JsonSchemaSpec(Body):
    """A JSON schema. It is always enforced, with any value of `strict`.

    `additional_properties` is an extension for object schemas that list properties and have no `additionalProperties`.
    With true they accept other properties, as in the standard; else the listed properties only. An object that
    requires a property that it does not list stays open.
    """

    field_advice: ClassVar[Mapping[str, str]] = dict.fromkeys(
        _SCHEMA_KEYWORDS, f"send the JSON schema in schema: {_NESTED_EXAMPLE}"
    )
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    additional_properties: bool | None = None


class SchemaFormat(Body):
    """JSON that a schema describes, in the form of chats."""

    field_advice: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("description", "name", "schema", "strict", *_SCHEMA_KEYWORDS), f"send it in json_schema: {_NESTED_EXAMPLE}"
    )
    type: Literal["json_schema"]
    json_schema: JsonSchemaSpec


class FlatSchemaFormat(JsonSchemaSpec):
    """JSON that a schema describes, in the form of responses."""

    field_advice: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(_SCHEMA_KEYWORDS, f"send the JSON schema in schema: {_FLAT_EXAMPLE}"),
        "json_schema": f"send its fields beside type: {_FLAT_EXAMPLE}",
    }
    type: Literal["json_schema"]


class GrammarFormat(Body):
    """A text that a grammar in llguidance's dialect of Lark derives."""

    type: Literal["grammar"]
    lark: str = Field(alias="grammar")


class RegexFormat(Body):
    """A text that a regular expression matches as a whole. This format is an extension of triforce."""

    type: Literal["regex"]
    regex: str


_BY_TYPE = Field(discriminator="type")
ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat | GrammarFormat | RegexFormat, _BY_TYPE]
FlatResponseFormat = Annotated[TextFormat | JsonFormat | FlatSchemaFormat | GrammarFormat | RegexFormat, _BY_TYPE]


def grammar_of(form: ResponseFormat | FlatResponseFormat | None) -> Grammar | None:
    """Return the grammar of a format, or None for no constraint. Raises RequestError."""
    match form:
        case JsonFormat():
            return Grammar.json()
        case SchemaFormat():
            return _schema_grammar(form.json_schema)
        case FlatSchemaFormat():
            return _schema_grammar(form)
        case GrammarFormat():
            return Grammar.lark(form.lark)
        case RegexFormat():
            return Grammar.regex(form.regex)
    return None


def _schema_grammar(spec: JsonSchemaSpec) -> Grammar:
    return Grammar.json(spec.json_schema, additional_properties=bool(spec.additional_properties))


class ModelField(Body):
    """A request to a model. model: the served model's name, or null."""

    is_request: ClassVar[bool] = True
    model: str | None = Field(None, description="Name of the served model, as in /v1/models; it may be left out")


class SamplingFields(CacheFields, ModelField):
    """Sampling parameters. Fields after `stream` are extensions of triforce."""

    prompt_field: ClassVar[str] = "prompt"
    """Name of the field that holds the prompt."""
    min_token_limit: ClassVar[int] = 1
    """Minimal limit of an answer's tokens."""
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool | None = Field(None, description="Stream the answer as server-sent events")
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    mode: str | None = Field(None, description="The tiers to use: a value of --mode")
    tier_stats: bool | None = Field(None, description="Report what each tier did, and which proposed each token")

    @property
    def sent_as(self) -> Mapping[str, str]:
        """Names of fields by parameter of `SamplingParams`, where they differ."""
        return {}

    @property
    def scored_only(self) -> bool:
        """Whether the request only scores the prompt, without new text."""
        return False

    @property
    def output_format(self) -> str | None:
        """Name of the field that constrains the answer's format, or None."""
        return None


class StreamOptions(Body):
    example: ClassVar[str] = '{"include_usage": true}'
    include_usage: bool | None = Field(None, description="Send a last chunk with usage, in chats and completions")
    include_obfuscation: Literal[False] | None = Field(None, description="No padding is ever sent")


class Thinking(Body):
    """Whether the model thinks before it answers, for chat templates with `enable_thinking`."""

    example: ClassVar[str] = '{"type": "disabled"} or {"type": "enabled"}'
    type: Literal["enabled", "disabled"]


def _require_template_keywords(value: Any) -> Any:
    if not isinstance(value, dict):
        example = '{"enable_thinking": false}'
        raise PydanticCustomError("example", "Input should be an object: {example}", {"example": example})
    for name, entry in value.items():
        if name in TEMPLATE_VARIABLES or name.endswith("_token"):
            shown = {
                "name": ascii(name[:60])[1:-1],
                "advice": "the request's other fields and the model set it; leave it out",
            }
            raise PydanticCustomError("reserved", "{name}: {advice}", shown)
        if name == "enable_thinking" and not isinstance(entry, bool | None):
            raise PydanticCustomError("bool_type", "enable_thinking must be true or false")
    return {name: entry for name, entry in check_size(value).items() if entry is not None}


TemplateKeywords = Annotated[dict[str, Any], BeforeValidator(_require_template_keywords)]
"""Variables of a chat template by name."""


class ThinkingField(Body):
    """Fields of a request whose turns a chat template formats."""

    thinking: Thinking | None = Field(None, description="Whether the model thinks before it answers")
    chat_template_kwargs: TemplateKeywords | None = Field(
        None, description="Variables of the chat template; those that it does not name are ignored"
    )
    reasoning_format: Literal["none", "auto", "deepseek"] | None = Field(
        None, description="none: thoughts stay in the text of the answer (extension of llama.cpp)"
    )
    continue_final_message: bool | None = Field(
        None, description="false: a new turn begins behind a last turn of the assistant, which is continued else"
    )
    add_generation_prompt: bool | None = Field(
        None, description="false: only where the last turn is continued (accepted as in other servers)"
    )

    def template_variables(self, template: str) -> dict[str, Any]:
        """Return variables for a chat template. Raises ApiError for thinking without a switch in the template.

        Variables that the template does not read are ignored, and named as such.
        """
        variables = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type == "enabled"
        if variables.get("enable_thinking") and "enable_thinking" not in template:
            field = "thinking" if self.thinking is not None else "chat_template_kwargs"
            raise field_error(field, "this model's chat template has no thinking switch; leave it out")
        unread_names = variables.keys() - {"enable_thinking"} - set(_WORDS.findall(template))
        self.ignore(*(f"chat_template_kwargs.{name}" for name in unread_names))
        return {name: value for name, value in variables.items() if name not in unread_names}


TOOL_CHOICE = (
    "auto (default): the model decides whether to call; required, or one function: the answer consists of calls"
)
"""Description of `tool_choice`."""
PARALLEL_CALLS = "false: one call at most; the answer ends behind it"
"""Description of `parallel_tool_calls`."""
CONTEXT_NOTE = "A text also ends where the context is full, with finish_reason length"
"""Description of the field that limits an answer."""
LOGPROBS = "message.output_text.logprobs"
"""Name of log-probabilities in `include` of responses."""


class TextOptions(Body):
    """`text` of responses."""

    skipped: ClassVar[Collection[str]] = ("verbosity",)
    field_advice: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("grammar", "json_schema", "name", "regex", "schema", "strict", "type"), "send it in format"
    )
    format: FlatResponseFormat | None = Field(None, description="Constraint on the text")


class CompletionFields(SamplingFields):
    """Fields that text and chat completions share."""

    n: int | None = None
    stop: str | Stops | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = Field(None, description="Token id to the bias of its logit")
    max_tokens: int | None = Field(
        None, description=f"Default: {COMPLETION_TOKENS}, in a chat {ANSWER_TOKENS}. {CONTEXT_NOTE}"
    )
    response_format: ResponseFormat | None = Field(None, description="Constraint on the text")
    stream_options: StreamOptions | None = Field(None, description="Needs stream")
    trace: bool | None = Field(
        None, description="Stream the state of decoding and token lengths (extension of triforce)"
    )
    return_progress: bool | None = Field(
        None, description="Stream the progress of the prefill (extension of llama.cpp)"
    )

    @property
    def output_format(self) -> str | None:
        return "response_format" if self.response_format and self.response_format.type != "text" else None


class CompletionBody(CompletionFields):
    """POST /v1/completions."""

    field_advice: ClassVar[Mapping[str, str]] = {
        "messages": "/v1/chat/completions takes it; send prompt here",
        "top_logprobs": "send logprobs: 5 for five alternatives at each token",
    }
    min_token_limit: ClassVar[int] = 0  # to score the prompt
    prompt: str | Ids | Texts | Batches = Field(description="A text, its token ids, or a list of prompts")
    echo: bool | None = Field(None, description="Begin each text with its prompt")
    parse_special: bool | None = Field(
        None, description="false: control tokens that the prompt spells stay text (extension of llama.cpp)"
    )
    logprobs: int | None = Field(None, description="Alternatives listed at each token; with echo, of the prompt too")

    @property
    def sent_as(self) -> Mapping[str, str]:
        return {"prompt_logprobs": "logprobs"}

    @property
    def scored_only(self) -> bool:
        return self.max_tokens == 0


class ChatBody(ToolFields, ThinkingField, CompletionFields):
    """POST /v1/chat/completions."""

    field_advice: ClassVar[Mapping[str, str]] = dict.fromkeys(("input", "prompt"), "send messages here")
    prompt_field: ClassVar[str] = "messages"
    messages: Messages = Field(description="The whole conversation")
    max_completion_tokens: int | None = Field(None, description="Newer name of max_tokens; it wins where both are sent")
    logprobs: bool | None = Field(None, description="Whether to return log-probabilities of new tokens")
    top_logprobs: int | None = Field(None, description="Alternatives listed at each new token")
    tools: Annotated[list[Tool | None], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions that the answer may call"
    )
    tool_choice: Literal["none", "auto", "required"] | OneTool | None = Field(None, description=TOOL_CHOICE)
    parallel_tool_calls: bool | None = Field(None, description=PARALLEL_CALLS)

    @property
    def sent_as(self) -> Mapping[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"max_tokens": limit, "logprobs": "top_logprobs"}

    def choose_tools(self, template: str) -> ToolChoice | None:
        """Return the tools that the answer may call. Raises ApiError or RequestError."""
        choice = self.tool_choice.function if isinstance(self.tool_choice, OneTool) else self.tool_choice
        has_calls = any(message.tool_calls or message.role == "tool" for message in self.messages)
        indexed_tools = enumerate(self.tools or ())
        functions = {f"tools.{i}.function.parameters": tool.function for i, tool in indexed_tools if tool}
        several = self.parallel_tool_calls is not False
        form = self.output_format
        field = self.prompt_field if has_calls else None
        return choose_tools(template, functions, choice, several=several, calls_field=field, output_format=form)


class ResponsesBody(ToolFields, ThinkingField, SamplingFields):
    """POST /v1/responses. The server stores nothing between requests."""

    field_advice: ClassVar[Mapping[str, str]] = {"messages": "is called input here"}
    prompt_field: ClassVar[str] = "input"
    input: str | InputItems = Field(description="A text, or the whole conversation as items")
    instructions: str | None = Field(None, description="System message in front of the input")
    text: TextOptions | None = Field(None, description="Options of the text")
    max_output_tokens: int | None = Field(None, description=f"Default: {ANSWER_TOKENS}. {CONTEXT_NOTE}")
    stream_options: StreamOptions | None = Field(None, description="Without effect: every stream ends with usage")
    tools: Annotated[list[FlatTool | None], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions that the answer may call"
    )
    tool_choice: Literal["none", "auto", "required"] | OneFlatTool | None = Field(None, description=TOOL_CHOICE)
    parallel_tool_calls: bool | None = Field(None, description=PARALLEL_CALLS)

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
        items = () if isinstance(self.input, str) else self.input
        has_calls = any(isinstance(item, CallItem | ResultItem) for item in items)
        several = self.parallel_tool_calls is not False
        choice = self.tool_choice
        form = self.output_format
        functions = {f"tools.{i}.parameters": tool for i, tool in enumerate(self.tools or ()) if tool}
        field = self.prompt_field if has_calls else None
        return choose_tools(template, functions, choice, several=several, calls_field=field, output_format=form)


class TokenizeBody(ThinkingField, ModelField):
    """POST /tokenize: a text or a conversation."""

    field_advice: ClassVar[Mapping[str, str]] = dict.fromkeys(("content", "input", "text"), "is called prompt here")
    prompt: str | None = Field(None, description="A text; send prompt or messages")
    messages: Messages | None = Field(None, description="A conversation, laid out by the chat template")
    add_special_tokens: bool | None = Field(None, description="false: no special tokens around prompt (default: true)")
    return_token_strs: bool | None = Field(None, description="Return the text of each token too")


class DetokenizeBody(ModelField):
    """POST /detokenize."""

    field_advice: ClassVar[Mapping[str, str]] = dict.fromkeys(("ids", "prompt", "token_ids"), "is called tokens here")
    tokens: Ids = Field(description="Token ids")

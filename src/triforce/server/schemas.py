"""Request bodies. Null is the default of every field.

This module checks the types of numbers only; `triforce.interface.sampling_params.SamplingParams` checks their range.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from triforce.interface.grammar import Grammar
from triforce.server.answers.call_format import CallFormat
from triforce.server.answers.marks import Marks
from triforce.server.errors import field_error
from triforce.server.limits import ANSWER_TOKENS, COMPLETION_TOKENS
from triforce.server.request_base import (
    Batches,
    Biases,
    Body,
    CacheFields,
    Ids,
    StopIds,
    Stops,
    Texts,
)
from triforce.server.tools import Function, FunctionName, ToolChoice, ToolFields, check_size, choose_tools
from triforce.server.turns import Message, Messages

TEMPLATE_VARIABLES = frozenset({"add_generation_prompt", "continue_final_message", "documents", "messages", "tools"})
"""Variables of chat templates that a request sets by other fields, or that are not supported."""
THINKING_SWITCH = "enable_thinking"
"""Variable of chat templates that says whether the model thinks before it answers."""
_WORDS = re.compile(r"\w+")


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


_SAMPLING = (
    *("temperature", "top_p", "seed", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos"),
    *("n", "stop", "presence_penalty", "frequency_penalty", "trace"),
)
"""Fields of doors that are parameters of `SamplingParams` under the same name."""


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
    def sampling_values(self) -> dict[str, Any]:
        """Values by parameter of `SamplingParams`, without the token limit and log-probabilities."""
        return {name: value for name in _SAMPLING if (value := getattr(self, name, None)) is not None}

    @property
    def token_limit(self) -> int | None:
        """Limit of new tokens; None: the default."""
        return None

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
        if name == THINKING_SWITCH and not isinstance(entry, bool | None):
            raise PydanticCustomError("bool_type", "enable_thinking must be true or false")
    return {name: entry for name, entry in check_size(value).items() if entry is not None}


TemplateKeywords = Annotated[dict[str, Any], BeforeValidator(_require_template_keywords)]
"""Variables of a chat template by name."""


EFFORTS = {
    **{"none": "low", "minimal": "low", "low": "low", "medium": "medium"},
    **{"high": "high", "xhigh": "high", "max": "high"},
}
"""Values of `reasoning_effort` that clients send, and the ones that chat templates know."""
NO_THINKING = ("none", "minimal")
"""Efforts that switch thinking off where a template has a switch only."""


class ThinkingField(Body):
    """Fields of a request whose turns a chat template formats."""

    thinking_is_hint: ClassVar[bool] = False
    """Whether a request for thoughts is ignored, not refused, where the chat template has no switch."""
    thinking_field: ClassVar[str] = "thinking"
    """Name of the field that says whether the model thinks."""
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

    @property
    def effort(self) -> tuple[str, str | None]:
        """Name of the field that says how long the model may think, and its value; without one, None."""
        return "", None

    @property
    def thinks(self) -> bool | None:
        """Whether the model thinks before it answers; None: as its chat template says."""
        return None

    def template_variables(self, template: str) -> dict[str, Any]:
        """Return variables for a chat template. Raises ApiError for thinking without a switch in the template.

        Variables that the template does not read are ignored, and named as such. So is an effort without effect: it
        becomes the template's `reasoning_effort`, or its switch.
        """
        variables: dict[str, Any] = {}
        effort_field, effort = self.effort
        if effort in EFFORTS and "reasoning_effort" in template:
            variables["reasoning_effort"] = EFFORTS[effort]
        elif effort in EFFORTS and THINKING_SWITCH in template:
            variables[THINKING_SWITCH] = effort not in NO_THINKING
        elif effort is not None:
            self.ignore(effort_field)
        variables |= self.chat_template_kwargs or {}
        if self.thinks is not None:
            variables[THINKING_SWITCH] = self.thinks
        if variables.get(THINKING_SWITCH) and THINKING_SWITCH not in template:
            field = self.thinking_field if self.thinks is not None else "chat_template_kwargs"
            if not self.thinking_is_hint:
                raise field_error(field, "this model's chat template has no thinking switch; leave it out")
            self.ignore(field)
        unread_names = variables.keys() - {THINKING_SWITCH} - set(_WORDS.findall(template))
        self.ignore(*(f"chat_template_kwargs.{name}" for name in unread_names))
        return {name: value for name, value in variables.items() if name not in unread_names}


class ThinkingSwitch(Body):
    """The field that switches thinking on and off, as in other servers."""

    thinking: Thinking | None = Field(None, description="Whether the model thinks before it answers")

    @property
    def thinks(self) -> bool | None:
        return None if self.thinking is None else self.thinking.type == "enabled"


TOOL_CHOICE = (
    "auto (default): the model decides whether to call; required, or one function: the answer consists of calls"
)
"""Description of `tool_choice`."""
PARALLEL_CALLS = "false: one call at most; the answer ends behind it"
"""Description of `parallel_tool_calls`."""
CONTEXT_NOTE = "A text also ends where the context is full, with finish_reason length"
"""Description of the field that limits an answer."""


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
    return_token_ids: bool | None = Field(
        None, description="Return the ids of the prompt and of new tokens (extension of vLLM)"
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
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def scored_only(self) -> bool:
        return self.max_tokens == 0


class ConversationBody(ToolFields, ThinkingField, SamplingFields):
    """A request for the next turn of a conversation. Each door has a form of its own."""

    default_limit: ClassVar[int | None] = ANSWER_TOKENS
    """Default limit of new tokens; None: the rest of the context."""

    @property
    def turns(self) -> Sequence[Message]:
        """The conversation. Raises ApiError."""
        raise NotImplementedError

    @property
    def functions(self) -> Mapping[str, Function]:
        """The functions that the answer may call, by the place of their parameters in the body."""
        raise NotImplementedError

    @property
    def function_choice(self) -> str | FunctionName | None:
        """Return `none`, `auto`, `required` or one function; None stands for `auto`."""
        raise NotImplementedError

    @property
    def has_several_calls(self) -> bool:
        """Whether an answer may have several calls."""
        raise NotImplementedError

    @property
    def answer_constraint(self) -> ResponseFormat | FlatResponseFormat | None:
        """Constraint on the text of the answer."""
        return None

    @property
    def logprob_count(self) -> int | None:
        """Number of alternatives in log-probabilities; None for no log-probabilities. Raises ApiError."""
        return None

    def choose_tools(self, form: CallFormat | None, marks: Marks) -> ToolChoice | None:
        """Return the tools that the answer may call. Raises ApiError or RequestError."""
        has_calls = any(turn.tool_calls or turn.role == "tool" for turn in self.turns)
        return choose_tools(
            form,
            marks,
            self.functions,
            self.function_choice,
            several=self.has_several_calls,
            calls_field=self.prompt_field if has_calls else None,
            output_format=self.output_format,
        )


class TokenizeBody(ThinkingSwitch, ThinkingField, ModelField):
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

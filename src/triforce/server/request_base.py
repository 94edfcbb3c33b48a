"""The base of all request bodies. A field that is not served and would change the answer is an error."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from triforce.errors import suggest

LATEST = ":latest"
"""Tag that clients of Ollama add to names of models, and look for in lists."""
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_IDS = 1024
MAX_BIASES = 1024
"""Maximal lengths of a request's lists, as in other servers."""

MAX_SALT = 256
"""Maximal length of a cache salt in characters."""
Ids = Annotated[list[int], Field(fail_fast=True)]
StopIds = Annotated[list[int], Field(max_length=MAX_STOP_IDS, fail_fast=True)]
Stops = Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)]
Biases = Annotated[dict[str, Any], Field(max_length=MAX_BIASES)]
Texts = Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
Batches = Annotated[list[Ids], Field(max_length=MAX_PROMPTS, fail_fast=True)]

NEUTRAL_FIELDS = {
    "user",
    "keep_alive",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
}
"""Fields that change no answer in any server, with any value. They are ignored silently."""
IGNORED_FIELDS = {"include", "prediction", "reasoning", "reasoning_effort", "store", "verbosity"}
"""Fields that common clients always send and that no model here supports. The answer's `HEADER` names them."""
HEADER = "X-Triforce-Ignored"
EMPTY_VALUES: tuple[object, ...] = ([], {})
MAX_TOLD = 32
"""Maximal number of names in `HEADER`."""
_TELLABLE = re.compile(r"[A-Za-z0-9_.-]{1,80}")

NO_LOGPROBS = "only chats and text completions have log-probabilities; leave it out"
_CHAT_ONLY = "this is a field of chats and responses; a text completion has no chat template"
_TOOLS_ADVICE = "use tools and tool_choice, in chats and responses; leave it out"
UNSUPPORTED_FIELDS: dict[str, tuple[tuple[object, ...], str]] = {
    "add_generation_prompt": ((True,), _CHAT_ONLY),
    "audio": ((), "this is a text model; leave it out"),
    "background": ((False,), "responses are not stored; leave it out"),
    "best_of": ((1,), "leave it out; n gives that many choices"),
    "cache_prompt": ((True,), "is called cache here; send cache: false"),
    "chat_template_kwargs": (({}, {"enable_thinking": False}), _CHAT_ONLY),
    "conversation": ((), "conversations are not stored; send the whole conversation as input"),
    "function_call": (("none", "auto"), _TOOLS_ADVICE),
    "functions": (([],), _TOOLS_ADVICE),
    "max_completion_tokens": ((), "is called max_tokens here, and in responses max_output_tokens"),
    "max_output_tokens": ((), "is called max_tokens here, and in chats max_completion_tokens"),
    "max_tokens": ((), "is called max_output_tokens here"),
    "max_tool_calls": ((), "your program calls the functions and decides when to stop; leave it out"),
    "min_tokens": ((0,), "leave it out; with ignore_eos: true a text goes on up to its limit"),
    "modalities": ((["text"],), "this is a text model; leave it out"),
    "parallel_tool_calls": ((True, False), _TOOLS_ADVICE),
    "previous_response_id": ((), "responses are not stored; send the whole conversation as input"),
    "prompt": ((), "prompts are not stored; send the text as input"),
    "continue_final_message": ((False,), _CHAT_ONLY),
    "reasoning_format": (("none",), _CHAT_ONLY),
    "response_format": (({"type": "text"},), "is called text.format here"),
    "skip_special_tokens": ((True,), "special tokens are never part of a text here; leave it out"),
    "structured_outputs": (({},), "is called response_format here, and in responses text.format"),
    "suffix": (("",), "text before a suffix cannot be generated; leave it out"),
    "text": (({}, {"format": {"type": "text"}}), "is called response_format here"),
    "thinking": (({"type": "disabled"},), _CHAT_ONLY),
    "tool_choice": (("none", "auto"), _TOOLS_ADVICE),
    "tools": (([],), _TOOLS_ADVICE),
    "top_logprobs": ((0,), NO_LOGPROBS),
    "truncation": (("disabled",), "prompts are never truncated; shorten the prompt and leave this out"),
    "web_search_options": ((), "there is no web search here; leave it out"),
}
"""Fields of OpenAI and of other servers: the only accepted values, and advice for any other value."""

_FORMAT_ADVICE = "the format of an answer is called response_format here, and in responses text.format"
_UNWRAP_ADVICE = "send its fields as fields of the request"
FIELD_ADVICE: dict[str, str] = {
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), "is called max_tokens here"),
    **dict.fromkeys(("format", "grammar", "json_schema"), _FORMAT_ADVICE),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), _FORMAT_ADVICE),
    **dict.fromkeys(("extra_body", "options"), _UNWRAP_ADVICE),
    "repeat_penalty": "is called repetition_penalty here",
    "think": 'is called thinking here, in chats and responses: {"type": "disabled"} or {"type": "enabled"}',
}
"""Advice on fields of other servers that have another name here."""


FOREIGN_FIELDS = frozenset({*UNSUPPORTED_FIELDS, *FIELD_ADVICE})
"""Fields of other doors and servers. A door that is `tolerant` refuses them unless it has them in `skipped`."""


class Body(BaseModel):
    """A JSON object in which every field has a meaning. A null counts as a missing field."""

    model_config = ConfigDict(strict=True, extra="forbid")
    field_advice: ClassVar[Mapping[str, str]] = {}
    """Advice by field, for fields that belong elsewhere or have another name in this body."""
    skipped: ClassVar[Collection[str]] = ()
    """Fields that are ignored and named in `HEADER`: hints, and what clients add to earlier answers."""
    example: ClassVar[str] = ""
    """Example for the error of a value that is no object."""
    tolerant: ClassVar[bool] = False
    """Whether unknown fields are skipped, and named in `HEADER`, except those with advice: clients add their own."""
    is_request: ClassVar[bool] = False
    """Whether this is a whole request, which may hold fields of other servers."""

    _ignored: list[str] = PrivateAttr(default_factory=list)

    @property
    def ignored(self) -> list[str]:
        """Names of the ignored fields of this body and of its parts."""
        nested_names = [f"{name}.{field}" for name, part in self._parts() for field in part.ignored]
        return sorted({*self._ignored, *nested_names})

    def ignore(self, *names: str) -> None:
        """Name fields as ignored. A name that no header can hold is told as `?`."""
        self._ignored = [*self._ignored, *(name if _TELLABLE.fullmatch(name) else "?" for name in names)]

    @classmethod
    def tolerates(cls, data: Mapping[str, Any]) -> bool:
        """Whether unknown fields of this object are skipped."""
        return cls.tolerant

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that name the ignored fields; empty without any."""
        names = self.ignored
        told_names = names if len(names) <= MAX_TOLD else [*names[:MAX_TOLD], "..."]
        return {HEADER: ", ".join(told_names)} if names else {}

    def _parts(self) -> Iterator[tuple[str, Body]]:
        for name, value in self:
            for part in value if isinstance(value, list) else (value,):
                if isinstance(part, Body):
                    yield name, part

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_unserved_fields(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            if cls.example and not isinstance(data, cls):
                raise PydanticCustomError("example", "Input should be an object: {example}", {"example": cls.example})
            return handler(data)
        required = {field.alias or name: field.is_required() for name, field in cls.model_fields.items()}
        unknown_names = {name for name in data.keys() - required.keys() if data[name] is not None}
        ignorable_names = {*cls.skipped, *(IGNORED_FIELDS if cls.is_request else ())}
        if cls.tolerates(data):
            ignorable_names |= unknown_names - cls.field_advice.keys() - (FOREIGN_FIELDS if cls.is_request else set())
        for name in sorted(unknown_names - ignorable_names - (NEUTRAL_FIELDS if cls.is_request else set())):
            neutral, advice = UNSUPPORTED_FIELDS.get(name, ((), "")) if cls.is_request else ((), "")
            if data[name] not in neutral:
                advice = cls.field_advice.get(name) or advice or (cls.is_request and FIELD_ADVICE.get(name)) or ""
                raise unknown_field(name, advice or _unknown(name, required))
        stated_fields = {
            name: data[name] for name in data.keys() & required if data[name] is not None or required[name]
        }
        body = handler(stated_fields)
        told_names = unknown_names & ignorable_names - (NEUTRAL_FIELDS if cls.is_request else set())
        body.ignore(*(name for name in told_names if data[name] is not False and data[name] not in EMPTY_VALUES))
        return body


def unknown_field(name: str, advice: str) -> PydanticCustomError:
    """Return the validation error of a field of the validated body or part."""
    shown = {"field": ascii(name[:60])[1:-1], "advice": advice}
    return PydanticCustomError("unknown_field", "{field}: {advice}", shown)


class CacheFields(Body):
    """Fields that control the reuse of a prompt's KV. They are extensions of triforce."""

    cache: bool | None = Field(None, description="false: neither reuse cached prompts nor cache this one")
    cache_salt: Annotated[str, Field(max_length=MAX_SALT)] | None = Field(
        None, description="Reuse only cached prompts of requests with the same API key and the same salt"
    )

    def scope(self, key: str) -> str | None:
        """Return the scope of the KV of a request with this key; None where the request uses no cache."""
        if self.cache is False:
            return None
        return f"{key}\n{self.cache_salt}" if self.cache_salt else key


def _unknown(name: str, field_names: Iterable[str]) -> str:
    return f"unknown field{suggest(name[:MAX_SALT], field_names)}; remove it"

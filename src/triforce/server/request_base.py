"""The base of all request bodies. A field that is not served and would change the answer is an error."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from triforce.errors import suggest

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

HARMLESS = {
    "user",
    "keep_alive",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
}
"""Fields that change no answer in any server, with any value. They are ignored silently."""
IGNORED = {"include", "prediction", "reasoning", "reasoning_effort", "store", "verbosity"}
"""Fields that common clients always send and that no model here supports. The answer's `HEADER` names them."""
HEADER = "X-Triforce-Ignored"
EMPTY_VALUES: tuple[object, ...] = ([], {})

NO_LOGPROBS = "log-probabilities are told in chats and texts only; leave it out"
_CONTINUED = "texts are continued as they are; chats and responses take it"
_TOOLS = "functions are called through tools and tool_choice of chats and responses; leave it out"
UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "add_generation_prompt": ((True,), "a conversation always awaits its answer here; leave it out"),
    "audio": ((), "this is a text model; leave it out"),
    "background": ((False,), "nothing is kept here; leave it out"),
    "best_of": ((1,), "leave it out; n gives that many choices"),
    "cache_prompt": ((True,), "is called cache here; send cache: false"),
    "chat_template_kwargs": (({}, {"enable_thinking": False}), _CONTINUED),
    "conversation": ((), "nothing is kept here; send the whole conversation as input"),
    "function_call": (("none", "auto"), _TOOLS),
    "functions": (([],), _TOOLS),
    "max_completion_tokens": ((), "is called max_tokens here, and in responses max_output_tokens"),
    "max_output_tokens": ((), "is called max_tokens here, and in chats max_completion_tokens"),
    "max_tokens": ((), "is called max_output_tokens here"),
    "max_tool_calls": ((), "functions are called by you, and you may stop when you like; leave it out"),
    "min_tokens": ((0,), "leave it out; with ignore_eos: true a text goes on up to its limit"),
    "modalities": ((["text"],), "this is a text model; leave it out"),
    "parallel_tool_calls": ((True, False), _TOOLS),
    "previous_response_id": ((), "nothing is kept here; send the whole conversation as input"),
    "prompt": ((), "prompts are not kept here; send their text"),
    "reasoning_format": (("none",), "what a model thinks is a part of its text here; leave it out"),
    "response_format": (({"type": "text"},), "is called text.format here"),
    "skip_special_tokens": ((True,), "marks of the model are never part of a text here; leave it out"),
    "structured_outputs": (({},), "is called response_format here, and in responses text.format"),
    "suffix": (("",), "nothing can be inserted before a suffix; leave it out"),
    "text": (({}, {"format": {"type": "text"}}), "is called response_format here"),
    "thinking": (({"type": "disabled"},), _CONTINUED),
    "tool_choice": (("none", "auto"), _TOOLS),
    "tools": (([],), _TOOLS),
    "top_logprobs": ((0,), NO_LOGPROBS),
    "truncation": (("disabled",), "prompts are not cut here; shorten it yourself and leave this out"),
    "web_search_options": ((), "nothing is searched here; leave it out"),
}
"""Fields of OpenAI and of other servers: the only accepted values, and advice for any other value."""

_FORM = "the form of an answer is sent as response_format here, and in responses as text.format"
_BESIDE = "send its fields beside the others"
FIELD_ADVICE: dict[str, str] = {
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), "is called max_tokens here"),
    **dict.fromkeys(("format", "grammar", "json_schema"), _FORM),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), _FORM),
    **dict.fromkeys(("extra_body", "options"), _BESIDE),
    "repeat_penalty": "is called repetition_penalty here",
    "think": 'is called thinking here, of chats and responses: {"type": "disabled"} or {"type": "enabled"}',
}
"""Advice on fields of other servers that have another name here."""


class Body(BaseModel):
    """A JSON object in which every field has a meaning. A null counts as a missing field."""

    model_config = ConfigDict(strict=True, extra="forbid")
    called: ClassVar[Mapping[str, str]] = {}
    """Advice by field, for fields that belong elsewhere or have another name in this body."""
    skipped: ClassVar[Collection[str]] = ()
    """Fields that are ignored and named in `HEADER`: additions of clients to earlier answers, and hints."""
    example: ClassVar[str] = ""
    """Example for the error of a value that is no object."""
    is_request: ClassVar[bool] = False
    """Whether this is a whole request, which may hold fields of other servers."""

    _ignored: list[str] = PrivateAttr(default_factory=list)

    @property
    def ignored(self) -> list[str]:
        """Names of the ignored fields of this body and of its parts."""
        nested_names = [f"{name}.{field}" for name, part in self._parts() for field in part.ignored]
        return sorted({*self._ignored, *nested_names})

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that name the ignored fields; empty without any."""
        return {HEADER: ", ".join(names)} if (names := self.ignored) else {}

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
        ignorable_names = {*cls.skipped, *(IGNORED if cls.is_request else ())}
        for name in sorted(unknown_names - ignorable_names - (HARMLESS if cls.is_request else set())):
            neutral, advice = UNSUPPORTED.get(name, ((), "")) if cls.is_request else ((), "")
            if data[name] not in neutral:
                advice = cls.called.get(name) or advice or (cls.is_request and FIELD_ADVICE.get(name)) or ""
                raise unknown_field(name, advice or _unknown(name, required))
        stated_fields = {
            name: data[name] for name in data.keys() & required if data[name] is not None or required[name]
        }
        body = handler(stated_fields)
        body._ignored = [
            *body._ignored,
            *(
                name
                for name in unknown_names & ignorable_names
                if data[name] is not False and data[name] not in EMPTY_VALUES
            ),
        ]
        return body


def unknown_field(name: str, advice: str) -> PydanticCustomError:
    """Return the validation error of a field of the validated body or part."""
    shown = {"field": ascii(name[:60])[1:-1], "advice": advice}
    return PydanticCustomError("unknown_field", "{field}: {advice}", shown)


class CacheFields(Body):
    """Fields that control the reuse of a prompt's KV. Extensions of triforce's."""

    cache: bool | None = Field(None, description="false: start from nothing that was read before, and leave nothing")
    cache_salt: Annotated[str, Field(max_length=MAX_SALT)] | None = Field(
        None, description="Share what was read with requests of the same salt only, among those of a key"
    )

    def scope(self, key: str) -> str | None:
        """Return the scope of the KV of a request with this key; None where the request uses no cache."""
        if self.cache is False:
            return None
        return f"{key}\n{self.cache_salt}" if self.cache_salt else key


def _unknown(name: str, field_names: Iterable[str]) -> str:
    return f"there is no such field here{suggest(name[:MAX_SALT], field_names)}; leave it out"

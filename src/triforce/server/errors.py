"""Errors in the shape of each door. Every message says what to do."""

from __future__ import annotations

import json
from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triforce.errors import ContextLengthError, RequestError, TriforceError, as_option, suggest
from triforce.interface.sampling_params import SamplingParams
from triforce.server.answer_fields import EncodableResponse


def validation_depth(error: dict[str, Any]) -> tuple[int, list[int]]:
    """Return how far validation got before an error, for comparison: depth and list indices of the error's place."""
    place = place_of(error)
    return len(place), [int(part) for part in place if part.isdecimal()]


def place_of(error: dict[str, Any]) -> list[str]:
    """Return the place of an error in a body, in terms of the schema."""
    return [str(part) for part in error["loc"][1:]]


def field_of(body: Any, error: dict[str, Any]) -> str:
    """Return the place of an error in terms of the body: the schema's place without types and tags of unions."""
    parts = list[str]()
    tags = set[int]()
    place = place_of(error)
    for n, part in enumerate(place, 1):
        if len(parts) not in tags and _chosen_by_type(parts):
            tags.add(len(parts))
        elif isinstance(body, dict) and part in body:
            parts.append(part)
            body = body[part]
        elif isinstance(body, list) and part.isdecimal() and int(part) < len(body):
            parts.append(part)
            body = body[int(part)]
        elif n == len(place) and error["type"] == "missing":
            parts.append(part)
    return ".".join(parts)


def is_null(body: Any, field: str) -> bool:
    """Return whether a body has null at this place."""
    for part in field.split("."):
        body = body[int(part)] if isinstance(body, list) else body.get(part, "")
    return body is None


def _chosen_by_type(parts: list[str]) -> bool:
    """Return whether this place holds a union, so that the schema's place continues with a tag."""
    return parts in (["response_format"], ["text", "format"]) or (parts[:1] == ["input"] and len(parts) == 2)


def text_of(error: dict[str, Any]) -> str:
    """Return the text of a validation error, without Python terms."""
    context = error.get("ctx", {})
    match error["type"]:
        case "too_long":
            return f"at most {context['max_length']} are taken; send fewer"
        case "too_short":
            return f"it is too short; send at least {context['min_length']}"
        case "model_attributes_type" | "model_type" | "dict_type":
            return "Input should be an object"
        case "union_tag_invalid":
            return f"type must be one of {context['expected_tags']}"
        case "union_tag_not_found":
            return "it must be an object with a type"
    return str(error["msg"])


RETRY_SECONDS = 5
UNKNOWN_FIELD = "unknown_field"
"""Type of validation errors that carry advice. They take precedence over all others."""
FIELDS = {field.name for field in fields(SamplingParams)} | {"messages", "mode", "prompt", "tools"}
"""Python arguments that are also fields of requests. All others are options of the server."""
TOO_LONG = "context_length_exceeded"  # OpenAI's code for a prompt longer than the context
_ANTHROPIC_KINDS = {
    **{401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error"},
    **{413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"},
}
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class QueueFull(Exception):
    """The queue is full, with `waiting` requests."""

    def __init__(self, waiting: int) -> None:
        super().__init__(waiting)
        self.waiting = waiting


class ShuttingDown(Exception):
    """The engine is stopping: it accepts no requests, or has ended this one."""


class ReplicaLost(Exception):
    """The engine failed in the middle of this text."""


class ApiError(Exception):
    """An error response: HTTP status, message, and optionally the field, a code and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def response(self, scope: Scope | None = None) -> JSONResponse:
        """Return the response in the shape of the door of a request. scope: of the request; None where it is unread."""
        body = shape_of(scope["path"] if scope else "")(self)
        return EncodableResponse(body, self.status, dict(self.headers or {}))


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return the error object of OpenAI's interface."""
    kind = "server_error" if error.status >= 500 else _KINDS.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return the error object of Anthropic's interface. Claude Code knows a long prompt by the first words."""
    known_kind = _ANTHROPIC_KINDS.get(error.status)
    kind = known_kind or ("api_error" if error.status >= 500 else "invalid_request_error")
    message = f"prompt is too long: {error.message}" if error.code == TOO_LONG else error.message
    return {"type": "error", "error": {"type": kind, "message": message}}


def ollama_error(error: ApiError) -> dict[str, Any]:
    """Return the error object of Ollama's interface."""
    return {"error": error.message}


SHAPES: dict[str, Callable[[ApiError], dict[str, Any]]] = {
    "/v1/messages": anthropic_error,
    "/api/v1": openai_error,  # OpenAI's interface below a wrong base
    "/api": ollama_error,
}
"""Shapes of errors by the base of a door's addresses, the first that fits; other doors have OpenAI's."""


def shape_of(path: str) -> Callable[[ApiError], dict[str, Any]]:
    """Return the function that shapes the errors of an address."""
    return next((shape for base, shape in SHAPES.items() if f"{path}/".startswith(f"{base}/")), openai_error)


class ClientDisconnected(Exception):
    """The client has closed the connection before the end of the answer."""


def field_error(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Return the 400 of a field whose value cannot be served."""
    return ApiError(400, message, param=param, code=code)


def _request_error(error: RequestError, field: str | None = None, fields: Mapping[str, str] | None = None) -> ApiError:
    """Return the 400 of a RequestError. Its `param` is the first request field that the error names, else `field`.

    fields: names in the body by argument, where they differ.
    """
    names = fields or {}

    def field_text(name: str, value: str | None) -> str:
        return _as_sent(names[name], value) if name in names else as_field(name, value)

    param = next((names.get(name, name) for name in error.arguments if name in FIELDS), field)
    return field_error(
        param, error.message_text(field_text), TOO_LONG if isinstance(error, ContextLengthError) else None
    )


def timeout_error(seconds: float) -> ApiError:
    text = f"not done after {seconds:g} seconds; ask for fewer tokens, or start the server with a longer --timeout"
    return ApiError(
        408, text, code="timeout", headers={"x-should-retry": "false"}
    )  # a header that OpenAI's clients obey


def internal_error() -> ApiError:
    return ApiError(500, "something broke in the server; its log says what", code="internal")


def retryable(status: int, reason: str, code: str) -> ApiError:
    """Return the error of a request that may succeed later, with a Retry-After header."""
    text = f"{reason}; try again in {RETRY_SECONDS} seconds" if status == 429 else reason
    return ApiError(status, text, code=code, headers={"Retry-After": str(RETRY_SECONDS)})


@contextmanager
def naming_field(field: str, fields: Mapping[str, str] | None = None) -> Iterator[None]:
    """Convert a RequestError raised within into an ApiError that names the field; see `_request_error`."""
    try:
        yield
    except RequestError as error:
        raise _request_error(error, field, fields) from error


def not_json(reason: str) -> ApiError:
    return ApiError(400, f"the body is not JSON: {reason}")


def as_field(name: str, value: str | None) -> str:
    """Return an argument as a field of the request, or as a command line option of the server."""
    return _as_sent(name, value) if name in FIELDS else f"{as_option(name, value)} of the server"


def _as_sent(field: str, value: str | None) -> str:
    return field if value is None else f"{field}: {json.dumps(literal_eval(value))}"


def refusal_for(error: Exception) -> ApiError | None:
    """Return the ApiError for a client's mistake or an expected error; None for a fault of the server."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return _request_error(error)
        case TriforceError():  # such as a model that cannot be run
            return ApiError(500, error.message_text(as_field), code="model")
        case QueueFull():
            return retryable(429, f"the queue is full: {error.waiting} requests wait in it", code="queue_full")
        case ShuttingDown():
            return retryable(503, "the server is stopping; send the request again when it is back", code="stopping")
        case ReplicaLost():
            return retryable(
                503, "the engine that generated this text has failed; send the request again", code="replica_lost"
            )
        case RequestValidationError():
            return _schema_error(error)
        case HTTPException():
            return _http_error(error)
    return None


def install_handlers(app: FastAPI) -> None:
    """Register handlers that answer all expected errors in one format."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return (refusal_for(error) or internal_error()).response(request.scope)

    for kind in (ApiError, TriforceError, QueueFull, ShuttingDown, ReplicaLost, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)


def _schema_error(error: RequestValidationError) -> ApiError:
    """Return the 400 of the first field that does not fit the schema. It does not quote the body."""
    errors = error.errors()
    place = place_of(errors[0])
    if errors[0]["type"] == "json_invalid":
        return not_json(errors[0].get("ctx", {}).get("error", "it cannot be read"))
    # A union reports an error for each of its types. Precedence: an error with advice, then a list that is too long,
    # then the error that validation reached last.
    candidates = [e for e in errors if place_of(e)[:1] == place[:1]]
    advice_error = next((e for e in candidates if e["type"] == UNKNOWN_FIELD), None)
    if advice_error:
        field = ".".join(filter(None, (field_of(error.body, advice_error), advice_error["ctx"]["field"])))
        return field_error(field, f"{field}: {advice_error['ctx']['advice']}")
    if not place:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    candidates = [e for e in candidates if e["type"] == "too_long"] or candidates
    field = field_of(error.body, farthest_error := max(candidates, key=validation_depth))
    if farthest_error["type"] != "missing" and is_null(error.body, field):
        return field_error(field, f"{field}: it is required, and null counts as missing; send a value")
    texts = dict.fromkeys(text_of(e) for e in candidates if field_of(error.body, e) == field)
    return field_error(field, f"{field}: {', or '.join(texts)}")


def _http_error(error: HTTPException) -> ApiError:
    return ApiError(error.status_code, f"{error.detail}; send a JSON object", headers=error.headers)


OTHER_SERVICES = {
    "audio": "audio is not made or read here",
    "conversations": "conversations are not kept here; send the whole one to /v1/responses",
    "batches": "files of requests are answered by `triforce batch`",
    "embeddings": "embeddings are not made here",
    "api": "of Ollama's interface chat, generate, ps, show, tags and version are here",
    "files": "no files are kept here; `triforce batch` answers a file of requests",
    "fine_tuning": "no models are trained here",
    "images": "pictures are not made here",
    "input_tokens": "/tokenize counts the tokens of a prompt or of messages",
    "moderations": "there is no moderation here",
    "rerank": "there is no reranking here",
    "score": "there is no reranking here",
}
"""Advice on addresses of other services, by a part of the address."""
NOT_KEPT = "answers are not kept here, so none can be fetched or deleted; send the whole conversation each time"
_LONGEST = 100
"""Length to which an address is truncated for comparison, in characters."""


def install_advice(app: FastAPI, addresses: Sequence[str]) -> None:
    """Answer with advice if the address or the method of a request is unknown. addresses: the known addresses."""

    async def not_found(request: Request, error: HTTPException) -> JSONResponse:
        return ApiError(404, _not_found_text(request.url.path, addresses)).response(request.scope)

    async def other_method(request: Request, error: HTTPException) -> JSONResponse:
        allowed_methods = (error.headers or {}).get("Allow", "another method")
        text = f"this address takes {allowed_methods}, not {request.method[:20]}; see /openapi.json"
        return ApiError(405, text, headers=error.headers).response(request.scope)

    app.add_exception_handler(404, not_found)  # type: ignore[arg-type]
    app.add_exception_handler(405, other_method)  # type: ignore[arg-type]


def _not_found_text(path: str, addresses: Iterable[str]) -> str:
    """Return the message of a 404 at `path`."""
    parts = path.strip("/").split("/")
    similar_address = _similar_address(path, addresses)
    reason = next((text for part in parts if (text := OTHER_SERVICES.get(part))), None)
    if {"completions", "responses"} & set(parts[:-1]):
        reason = reason or NOT_KEPT
    if reason and not similar_address:
        return f"{reason}; /openapi.json lists the addresses"
    if parts == ["v1"]:
        return "this is the base of other addresses, such as /v1/models; /openapi.json lists them"
    nearest = f" (did you mean {similar_address}?)" if similar_address else suggest(path[:_LONGEST], addresses)
    return f"there is nothing at this address{nearest}; /openapi.json lists the addresses"


def _similar_address(path: str, addresses: Iterable[str]) -> str:
    """Return the address that equals `path` except for a missing or additional base; empty if there is none.

    An additional base may be an address itself, as in /v1/completions/chat/completions.
    """
    address_end = f"/{path.strip('/')}"[:_LONGEST]
    ends = [address_end, *(address_end.removeprefix(base) for base in addresses if address_end.startswith(f"{base}/"))]
    longer_addresses = [address for address in addresses if address.endswith(tuple(ends))]
    shorter_addresses = [address for address in addresses if address_end.endswith(address)]
    return min(longer_addresses, key=len, default="") or max(shorter_addresses, key=len, default="")


class TrailingSlashes:
    """Removes slashes from the ends of addresses, where base URLs of clients often have one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self.app(scope, receive, send)


class HeadAsGet:
    """Answers HEAD as GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await self.app(scope, receive, send)

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        get_scope = {**scope, "method": "GET"}
        await self.app(get_scope, receive, send_head)
        scope["route"] = get_scope.get("route")  # the access log names it

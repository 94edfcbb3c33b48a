"""Errors in OpenAI's shape. Every refusal says what to do about it."""

from __future__ import annotations

import json
from ast import literal_eval
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from triforce.errors import ContextLengthError, RequestError, TriforceError, as_option
from triforce.interface.sampling_params import SamplingParams
from triforce.server.body_errors import field_of, is_null, place_of, reach_of, text_of
from triforce.server.engine_client import QueueFull, ReplicaLost, ShuttingDown

RETRY_SECONDS = 5
UNKNOWN = "unknown_field"
"""The kind of errors in a body that say what to do, whatever else it might have been."""
FIELDS = {field.name for field in fields(SamplingParams)} | {"messages", "mode", "prompt", "tools"}
"""Arguments in Python that are fields of requests. The others are options of the server."""
TOO_LONG = "context_length_exceeded"  # OpenAI's code of a prompt that the context has no room for
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error: HTTP status, a text for people, and perhaps the field that is meant."""

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
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, Any]:
        """The error object of OpenAI's interface."""
        kind = "server_error" if self.status >= 500 else _KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, dict(self.headers or {}))


class ClientDisconnected(Exception):
    """The client is gone; nobody reads the answer."""


def wrong(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A field that cannot be served as it is."""
    return ApiError(400, message, param=param, code=code)


def _asked(error: RequestError, field: str | None = None, fields: Mapping[str, str] | None = None) -> ApiError:
    """Return the 400 of a RequestError. `param` is the first request field that it names, else `field`.

    fields: what the body calls arguments that have another name there.
    """
    names = fields or {}

    def field_text(name: str, value: str | None) -> str:
        return _as_sent(names[name], value) if name in names else as_field(name, value)

    param = next((names.get(name, name) for name in error.arguments if name in FIELDS), field)
    return wrong(param, error.worded(field_text), TOO_LONG if isinstance(error, ContextLengthError) else None)


def took_too_long(seconds: float) -> ApiError:
    text = f"not done after {seconds:g} seconds; ask for fewer tokens, or start the server with a longer --timeout"
    return ApiError(408, text, code="timeout", headers={"x-should-retry": "false"})  # heard by OpenAI's clients


def broken() -> ApiError:
    return ApiError(500, "something broke in the server; its log says what", code="internal")


def later(status: int, reason: str, code: str) -> ApiError:
    """Return the refusal of a request that may be served when it is sent again."""
    text = f"{reason}; try again in {RETRY_SECONDS} seconds" if status == 429 else reason
    return ApiError(status, text, code=code, headers={"Retry-After": str(RETRY_SECONDS)})


@contextmanager
def about(field: str, fields: Mapping[str, str] | None = None) -> Iterator[None]:
    """Name the field of a request in a RequestError that is raised within, as an ApiError; see `_asked`."""
    try:
        yield
    except RequestError as error:
        raise _asked(error, field, fields) from error


def not_json(reason: str) -> ApiError:
    return ApiError(400, f"the body is not JSON: {reason}")


def as_field(name: str, value: str | None) -> str:
    """Return an argument as a client has it, or as the one who started the server has."""
    return _as_sent(name, value) if name in FIELDS else f"{as_option(name, value)} of the server"


def _as_sent(field: str, value: str | None) -> str:
    return field if value is None else f"{field}: {json.dumps(literal_eval(value))}"


def refusal_for(error: Exception) -> ApiError | None:
    """Return the refusal for an error that is the client's or was foreseen; None for a fault of the server."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return _asked(error)
        case TriforceError():  # a model that cannot be computed with, say
            return ApiError(500, error.worded(as_field), code="model")
        case QueueFull():
            return later(429, f"the queue is full: {error.waiting} requests wait in it", code="queue_full")
        case ShuttingDown():
            return later(503, "the server is stopping; send the request again when it is back", code="stopping")
        case ReplicaLost():
            return later(503, "what was making this text is gone; send the request again", code="replica_lost")
        case RequestValidationError():
            return _invalid(error)
        case HTTPException():
            return _http(error)
    return None


def install(app: FastAPI) -> None:
    """Answer all foreseen errors in one shape."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return (refusal_for(error) or broken()).response()

    for kind in (ApiError, TriforceError, QueueFull, ShuttingDown, ReplicaLost, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)


def _invalid(error: RequestValidationError) -> ApiError:
    """The first thing that does not fit the schema. What was sent is not repeated."""
    errors = error.errors()
    place = place_of(errors[0])
    if errors[0]["type"] == "json_invalid":
        return not_json(errors[0].get("ctx", {}).get("error", "it cannot be read"))
    # What may be one of several things fails as each of them. What is said of one is told, too many is what was meant,
    # and so is what was understood farthest.
    meant = [e for e in errors if place_of(e)[:1] == place[:1]]
    said = next((e for e in meant if e["type"] == UNKNOWN), None)
    if said:
        field = ".".join(filter(None, (field_of(error.body, said), said["ctx"]["field"])))
        return wrong(field, f"{field}: {said['ctx']['advice']}")
    if not place:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    meant = [e for e in meant if e["type"] == "too_long"] or meant
    field = field_of(error.body, farthest := max(meant, key=reach_of))
    if farthest["type"] != "missing" and is_null(error.body, field):
        return wrong(field, f"{field}: it is required, and null says nothing; send a value")
    texts = dict.fromkeys(text_of(e) for e in meant if field_of(error.body, e) == field)
    return wrong(field, f"{field}: {', or '.join(texts)}")


def _http(error: HTTPException) -> ApiError:
    return ApiError(error.status_code, f"{error.detail}; send a JSON object", headers=error.headers)

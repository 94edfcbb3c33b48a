"""JSON bodies. A child process parses large ones and bounds their number of values (see `json_reader`)."""

from __future__ import annotations

import marshal
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from triforce.sandbox import ChildProcess
from triforce.server import json_reader
from triforce.server.errors import ApiError, not_json, retryable
from triforce.server.json_reader import parse
from triforce.server.limits import LARGE_INPUT, MAX_CONTAINERS, MAX_VALUES
from triforce.server.service import Service, key_of, unless_disconnected

PARSE_SECONDS = 60
"""Time limit of a parser process in seconds. A parser with a processor of its own takes about one second."""


class JsonRoute(APIRoute):
    """A route that parses the body, within the limits of `limits`, before the endpoint runs."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            body = await request.body()
            if is_from_program(request):
                request.scope["headers"] = [*_without_type(request), (b"content-type", b"application/json")]
                request = Request(request.scope, request.receive)
                request._body = body
            if body and "json" in request.headers.get("content-type", ""):
                if (coding := request.headers.get("content-encoding", "")) not in ("", "identity"):
                    raise _encoding_error(ascii(coding[:20])[1:-1])
                outcome = await _parse_in_child(request, body) if len(body) > LARGE_INPUT else parse(body)
                request = _ParsedRequest(request, body, _value(*outcome))
            return await handle(request)

        return handle_parsed


def is_from_program(request: Request) -> bool:
    """Whether a request below /api is no page's. Ollama's server reads any content type, and its users send none.

    A browser sends other types than JSON to other servers without asking them, so a page's request needs the type.
    """
    is_ollama = request.url.path.startswith("/api/")
    return is_ollama and not {"origin", "sec-fetch-site", "referer"} & set(request.headers.keys())


def _without_type(request: Request) -> list[tuple[bytes, bytes]]:
    return [header for header in request.scope["headers"] if header[0] != b"content-type"]


class _ParsedRequest(Request):
    """A request with a parsed body."""

    def __init__(self, request: Request, body: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._body = body
        self._value = value

    async def json(self) -> Any:
        return self._value


async def _parse_in_child(request: Request, body: bytes) -> tuple[str, Any]:
    """Return the outcome of `json_reader.parse` in a child process. Raises ApiError or ClientDisconnected."""
    service: Service = request.app.state.service
    child = ChildProcess([sys.executable, "-I", "-S", json_reader.__file__, str(MAX_CONTAINERS), str(MAX_VALUES)])
    work = partial(child.run, body, PARSE_SECONDS)
    parse_task = service.parser.large_slots.run(key_of(request), work, child.end)
    written = await unless_disconnected(request.receive, parse_task)
    if written is None:
        raise retryable(503, "the body could not be parsed in time; send it again", code="busy")
    outcome: tuple[str, Any] = marshal.loads(written)
    return outcome


def _value(outcome: str, value: Any) -> Any:
    """Return the value of a successful outcome. Raises ApiError for the others."""
    match outcome:
        case "compressed":
            raise _encoding_error("gzip or zstd")
        case "encoding":
            raise not_json(f"the byte at offset {value:,} is not UTF-8; encode the body as UTF-8, not as Latin-1")
        case "containers":
            raise ApiError(400, f"the body holds {value:,} objects and arrays; at most {MAX_CONTAINERS:,} are taken, "
                           "so send fewer messages, parts or prompts")  # fmt: skip
        case "values":
            raise ApiError(400, f"the body holds {value:,} values; at most {MAX_VALUES:,} are taken, "
                           "so send texts in place of token ids, or fewer token ids")  # fmt: skip
        case "syntax":
            raise not_json(value)
        case "unreadable":
            raise not_json("it is not text, is nested too deeply, or has a number that is not finite or too long")
    return value


def _encoding_error(coding: str) -> ApiError:
    """Return the error for a compressed body."""
    text = f"the body is compressed ({coding}), which is not supported; send plain JSON, without Content-Encoding"
    return ApiError(415, text, headers={"Accept-Encoding": "identity"})

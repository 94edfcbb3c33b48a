"""Logs on stderr, one JSON object per line. User text is never logged: no prompt, answer, query or error text."""

from __future__ import annotations

import json
import logging
import logging.config
import traceback
from datetime import UTC, datetime
from time import perf_counter
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triforce.server.errors import ClientDisconnected, internal_error

LOG = logging.getLogger("triforce.server")
CLIENT_GONE = 499
"""Logged status of a request whose client disconnected, as in nginx."""


class JsonLines(logging.Formatter):
    """Formats time, level, event, and the fields of `extra={"fields": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        return json.dumps(line | getattr(record, "fields", {}) | _error(record.exc_info))


def event(name: str, **fields: Any) -> None:
    """Log an event."""
    LOG.info(name, extra={"fields": fields})


def failure(name: str, error: BaseException, **fields: Any) -> None:
    """Log a fault of the server, with its stack trace."""
    LOG.error(name, exc_info=error, extra={"fields": fields})


def configure() -> None:
    """Send all logs of the process to stderr, as JSON lines."""
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"json": {"()": JsonLines}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
            "loggers": {"triforce.server": {"level": "INFO"}, "uvicorn": {"level": "WARNING"}},
            "root": {"handlers": ["stderr"], "level": "WARNING"},
        }
    )


class AccessLog:
    """The outermost middleware: logs one line for each request, and answers a failed request with a 500."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        report: dict[str, Any] = {"request": uuid4().hex, "method": scope["method"]}
        scope.setdefault("state", {})["report"] = report
        started = perf_counter()
        status = 0

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", report["request"].encode())]
            await send(message)

        try:
            await self.app(scope, receive, note)
        except ClientDisconnected:
            status = CLIENT_GONE
        except Exception as error:
            failure("request broke", error, request=report["request"])
            if not status:
                await internal_error().response(scope)(scope, receive, note)
        finally:
            # The log names the matched route only, as the path contains text of the client.
            route = getattr(scope.get("route"), "path", None)
            seconds = round(perf_counter() - started, 4)
            event("request", **report, route=route, status=status, seconds=seconds)


def _error(info: Any) -> dict[str, Any]:
    """Return the type of an error and its stack trace. Its text is left out, as it may quote a prompt."""
    if not info or info[0] is None:
        return {}
    frames = traceback.extract_tb(info[2])
    return {"error": info[0].__name__, "trace": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]}

"""Logs as one JSON object a line on stderr. User text is never logged: no prompt, answer, query or error text."""

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
"""Logged as the status of a request whose client hung up; nginx's number."""


class JsonLines(logging.Formatter):
    """Time, level, event, and the fields given as `extra={"fields": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        return json.dumps(line | getattr(record, "fields", {}) | _error(record.exc_info))


def event(name: str, **fields: Any) -> None:
    """Log that something happened."""
    LOG.info(name, extra={"fields": fields})


def failure(name: str, error: BaseException, **fields: Any) -> None:
    """Log a fault of the server, with where it happened."""
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
    """Outermost: one line of log for each request, and an answer even where the server is at fault."""

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
                await internal_error().response()(scope, receive, note)
        finally:
            # Of the path only a known route: what a client writes into it is its own affair.
            route = getattr(scope.get("route"), "path", None)
            seconds = round(perf_counter() - started, 4)
            event("request", **report, route=route, status=status, seconds=seconds)


def _error(info: Any) -> dict[str, Any]:
    """The kind of an error and the lines it passed; its text may quote a prompt."""
    if not info or info[0] is None:
        return {}
    frames = traceback.extract_tb(info[2])
    return {"error": info[0].__name__, "trace": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]}

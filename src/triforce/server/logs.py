"""Logs as one JSON object a line on stderr. User text is never logged: no prompt, answer, query or error text."""

from __future__ import annotations

import json
import logging
import logging.config
import traceback
from datetime import UTC, datetime
from typing import Any

LOG = logging.getLogger("triforce.server")


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


def _error(info: Any) -> dict[str, Any]:
    """The kind of an error and the lines it passed; its text may quote a prompt."""
    if not info or info[0] is None:
        return {}
    frames = traceback.extract_tb(info[2])
    return {"error": info[0].__name__, "trace": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]}

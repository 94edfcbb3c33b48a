"""The access log holds nothing that a client wrote; a server that stops says so."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from typing import Any

import pytest

from tests.helpers.asgi_client import SAMPLED, ask, good, refused
from tests.helpers.guarded_app import PATH
from triforce.llm import LLM
from triforce.server import logs
from triforce.server.app import create_app
from triforce.server.engine_client import EngineLoad
from triforce.server.engine_thread import Worker
from triforce.server.errors import ShuttingDown
from triforce.server.limits import Limits


def test_access_log_is_json_without_user_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Worker(llm, Limits(waiting=1))
    app = create_app(llm, engine, "tiny")
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logs.JsonLines())
    monkeypatch.setattr(logs.LOG, "handlers", [handler])
    logs.LOG.setLevel(logging.INFO)
    response = ask(app, PATH + "?q=secret", {"prompt": "the secret cat", **SAMPLED, "user": "secret"})
    answer_text = good(response)["choices"][0]["text"]
    good(ask(app, PATH, {"prompt": "the cat", "max_tokens": 0, "echo": True, "logprobs": 0}))
    ask(app, "/secret", {"prompt": "secret"})
    ask(app, PATH, {"prompt": "secret", "secret": "secret"})
    ask(
        app,
        PATH,
        content=b'{"prompt": "secret',
        headers={"authorization": "Bearer secret", "content-type": "application/json"},
    )
    monkeypatch.setattr(engine, "submit", lambda asks: {}["the secret cat"])
    assert "its log" in refused(ask(app, PATH, {"prompt": "secret"}), 500)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert "secret" not in out.getvalue() and answer_text not in out.getvalue()
    request_line = next(line for line in lines if line["event"] == "request")
    assert request_line["request"] == response.headers["x-request-id"] and request_line["route"] == PATH
    assert request_line["status"] == 200 and request_line["new_tokens"] == 24 and request_line["prompt_tokens"] > 0
    scored = [line for line in lines if line["event"] == "request"][1]
    assert scored["new_tokens"] == 0 and scored["prompt_tokens"] > 0, "a prompt that is only scored"
    broken = next(line for line in lines if line["level"] == "error")
    assert broken["error"] == "KeyError" and broken["trace"]
    asyncio.run(engine.close())


class Stopped:
    """An engine that was told to stop."""

    alive = False

    def submit(self, asks: object) -> Any:
        raise ShuttingDown

    def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0)


def test_stopping_server_answers_503(llm: LLM) -> None:
    app = create_app(llm, Stopped(), "tiny")  # type: ignore[arg-type]
    response = ask(app, PATH, {"prompt": "x"})
    assert "stopping" in refused(response, 503) and response.headers["retry-after"]
    assert "stopped" in refused(ask(app, "/health"), 503)

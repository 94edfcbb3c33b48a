"""Who may ask, how much may be sent, and what is never written down: a test for each promise."""

from __future__ import annotations

import asyncio
import hmac
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.helpers.asgi_client import SAMPLED, ask, good, hang_up, refused
from triforce.cli import main
from triforce.errors import RequestError
from triforce.llm import LLM
from triforce.server import logs, security
from triforce.server.app import create_app
from triforce.server.engine_client import EngineLoad, ShuttingDown
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits
from triforce.server.security import BodyLimit, HostCheck
from triforce.server.startup_checks import KEYS_VARIABLE, read_keys, require_key_beyond_loopback, require_origins

KEY, OTHER = "a-key-of-many-letters", "another-key-as-long"
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def guarded(llm: LLM) -> Iterator[ASGIApp]:
    engine = Worker(llm, Limits(waiting=2))
    yield create_app(llm, engine, "tiny", keys=[KEY, OTHER], hosts=["gpu.example.org"], limits=Limits(body_bytes=2000))
    asyncio.run(engine.close())


# Keys.


def test_every_address_but_health_needs_a_key(guarded: ASGIApp) -> None:
    assert good(ask(guarded, "/health")) == {"status": "ok"}
    for path in (PATH, "/v1/models", "/metrics", "/tokenize", "/openapi.json", "/nowhere", "/health/", "/docs"):
        response = ask(guarded, path)
        assert "Authorization: Bearer" in refused(response, 401) and response.headers["www-authenticate"] == "Bearer"
        assert ask(guarded, path, headers={"authorization": f"Bearer {KEY}"}).status_code != 401


@pytest.mark.parametrize(
    "sent", [KEY, f"Basic {KEY}", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", "Bearer", "Bearer é", ""]
)
def test_wrong_keys(guarded: ASGIApp, sent: str) -> None:
    assert ask(guarded, "/v1/models", headers={"authorization": sent.encode("latin-1")}).status_code == 401


def test_each_key_is_compared_in_constant_time(guarded: ASGIApp, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[tuple[int, int]] = []
    plain = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        lengths.append((len(a), len(b)))
        return plain(a, b)

    monkeypatch.setattr(security.hmac, "compare_digest", compare)
    for key in (KEY, "x"):
        ask(guarded, "/v1/models", headers={"authorization": f"Bearer {key}"})
    assert lengths == [(32, 32)] * 4  # digests: not even the length of a key tells


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n\n")
    monkeypatch.setenv(KEYS_VARIABLE, f" {OTHER} ,")
    assert read_keys(str(file)) == [KEY, OTHER] and read_keys(None) == [OTHER]
    monkeypatch.delenv(KEYS_VARIABLE)
    for text in ("", "short", "é" * 20):
        file.write_text(text)
        with pytest.raises(RequestError):
            read_keys(str(file))
    with pytest.raises(RequestError, match="cannot be read"):
        read_keys(str(tmp_path / "nowhere"))


# Addresses.


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_another_address_without_a_key_refuses_to_start(
    host: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    assert main(["serve", "--host", host, "--port", "0"]) == 2
    assert "--api-key-file" in capsys.readouterr().err
    require_key_beyond_loopback(host, [KEY])


def test_this_machine_alone_needs_no_key() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        require_key_beyond_loopback(host, [])


@pytest.mark.parametrize(
    ("host", "known"),
    [
        *[(name, True) for name in ("localhost", "LOCALHOST:8000", "127.0.0.1:80", "[::1]:8000", "10.1.2.3")],
        *[(name, True) for name in ("gpu.example.org", "gpu.example.org.:8000")],
        *[(name, False) for name in ("evil.example.org", "localhost.evil.org", "", "127.0.0.1.evil.org", "[evil]")],
    ],
)
def test_the_host_header_names_this_server(guarded: ASGIApp, host: str, known: bool) -> None:
    assert ask(guarded, "/health", headers={"host": host}).status_code == (200 if known else 400)


def test_pages_of_named_origins_may_ask(llm: LLM, app: ASGIApp) -> None:
    """A browser asks first, without the key; the answer comes with it, refusals too. Nobody is named by default."""
    page = "https://notes.example.org"
    asks = {"origin": page, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    engine = Worker(llm, Limits(waiting=1))
    opened = create_app(llm, engine, "tiny", keys=[KEY], origins=[page])
    body = {"prompt": "the cat", "max_tokens": 1, "verbosity": "low"}

    def allowed(app: ASGIApp, origin: str, **headers: str) -> tuple[int, str | None]:
        answer = ask(app, "/v1/completions", body, headers={"origin": origin, **headers})
        return answer.status_code, answer.headers.get("access-control-allow-origin")

    async def preflight(app: ASGIApp, origin: str) -> tuple[int, str | None]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            answer = await client.options("/v1/completions", headers=asks | {"origin": origin})
            return answer.status_code, answer.headers.get("access-control-allow-origin")

    assert asyncio.run(preflight(opened, page)) == (200, page)
    assert asyncio.run(preflight(opened, "https://evil.example"))[1] is None
    assert asyncio.run(preflight(app, page))[1] is None
    assert allowed(opened, page, authorization=f"Bearer {KEY}") == (200, page)
    assert allowed(opened, page) == (401, page) and allowed(app, page) == (200, None)
    asyncio.run(engine.close())


@pytest.mark.parametrize("origin", ["example.org", "https://", "https://a b", "https://a.org/page", ""])
def test_what_is_no_origin(origin: str) -> None:
    require_origins(["*", "https://example.org", "http://localhost:3000"])
    with pytest.raises(RequestError, match="is no origin"):
        require_origins([origin])


def test_a_request_has_one_host() -> None:
    for hosts in ([], [b"localhost", b"localhost"]):
        assert send_to(HostCheck(echo, []), headers=[(b"host", host) for host in hosts])[0] == 400


def test_pages_of_other_sites_read_nothing(app: ASGIApp) -> None:
    headers = {"origin": "https://evil.example.org", "access-control-request-method": "POST"}
    response = ask(app, "/v1/models", headers=headers)
    assert not [name for name in response.headers if name.startswith("access-control")]


# Bodies and time.


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def send_to(app: ASGIApp, chunks: tuple[bytes, ...] = (b"",), wait: float = 0, headers: Any = ()) -> tuple[int, bytes]:
    got: list[Message] = []
    unread = [{"type": "http.request", "body": c, "more_body": i < len(chunks)} for i, c in enumerate(chunks, 1)]

    async def receive() -> Message:
        await asyncio.sleep(wait)
        return unread.pop(0)

    async def send(message: Message) -> None:
        got.append(message)

    asyncio.run(app({"type": "http", "path": "/", "headers": headers}, receive, send))
    return got[0]["status"], got[1]["body"]


def test_a_body_is_bounded_as_announced_and_as_it_comes() -> None:
    app = BodyLimit(echo, Limits(body_bytes=10))
    assert send_to(app, (b"12345", b"67890")) == (200, b"1234567890")
    assert send_to(app, (b"12345", b"67890", b"1"))[0] == 413
    assert send_to(app, headers=[(b"content-length", b"11")])[0] == 413
    assert send_to(app, headers=[(b"content-length", b"9" * 5000)])[0] == 413


def test_without_a_key_no_large_body_is_kept(guarded: ASGIApp) -> None:
    for path in security.OPEN:
        assert ask(guarded, path, content=b" " * 1024).status_code != 413
        assert "1024 bytes" in refused(ask(guarded, path, content=b" " * 1025), 413)


def test_a_body_must_arrive_in_time() -> None:
    assert send_to(BodyLimit(echo, Limits(body_seconds=0.05)), wait=0.2)[0] == 408


def test_a_large_request_is_refused(guarded: ASGIApp) -> None:
    response = ask(guarded, PATH, {"prompt": "x" * 3000}, headers={"authorization": f"Bearer {KEY}"})
    assert "--max-body" in refused(response, 413)


def test_a_request_reserves_no_more_kv_than_allowed(llm: LLM) -> None:
    limits = Limits(kv_tokens=100)
    app = create_app(llm, Worker(llm, limits), "tiny", limits=limits)
    assert "lower n or max_tokens" in refused(ask(app, PATH, {"prompt": [5] * 10, "max_tokens": 41, "n": 2}))
    assert ask(app, PATH, {"prompt": [5] * 10, "max_tokens": 40, "n": 2}).status_code == 200
    asyncio.run(app.state.service.engine.close())


def test_a_request_ends_when_its_time_is_up(llm: LLM) -> None:
    app = create_app(llm, Worker(llm, Limits(waiting=1)), "tiny", limits=Limits(seconds=0.2))
    body = {"prompt": "the cat", "max_tokens": 2000, "ignore_eos": True}
    assert "--timeout" in refused(ask(app, PATH, body), 408)
    assert '"code": "timeout"' in ask(app, PATH, body | {"stream": True}).text
    asyncio.run(app.state.service.engine.close())


def test_a_full_queue_says_when_to_come_back(llm: LLM) -> None:
    """One runs, one waits, the third is told to come back; what is given up makes room."""
    app = create_app(llm, Worker(llm, Limits(waiting=1, rows=1)), "tiny")
    long = {"prompt": "the cat", "max_tokens": 2000, "ignore_eos": True}

    async def three() -> list[int]:
        tasks = [asyncio.create_task(hang_up(app, PATH, long, after=0)) for _ in range(2)]
        await asyncio.sleep(0.1)
        refusal = await hang_up(app, PATH, long, after=2)
        assert (b"retry-after", b"5") in refusal[0]["headers"]
        await asyncio.gather(*tasks)
        return [refusal[0]["status"], (await hang_up(app, PATH, long | {"max_tokens": 2}, after=2))[0]["status"]]

    assert asyncio.run(three()) == [429, 200]
    asyncio.run(app.state.service.engine.close())


def test_more_prompts_than_the_queue_ever_holds_are_refused_for_good(llm: LLM) -> None:
    limits = Limits(waiting=1, rows=1)
    app = create_app(llm, Worker(llm, limits), "tiny", limits=limits)
    assert "at most 2" in refused(ask(app, PATH, {"prompt": ["a", "b", "c"], "max_tokens": 1}))
    assert ask(app, PATH, {"prompt": ["a", "b"], "max_tokens": 1}).status_code == 200
    asyncio.run(app.state.service.engine.close())


# What is written down.


def test_logs_are_json_without_what_anybody_wrote(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Worker(llm, Limits(waiting=1))
    app = create_app(llm, engine, "tiny")
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logs.JsonLines())
    monkeypatch.setattr(logs.LOG, "handlers", [handler])
    logs.LOG.setLevel(logging.INFO)
    response = ask(app, PATH + "?q=secret", {"prompt": "the secret cat", **SAMPLED, "user": "secret"})
    made = good(response)["choices"][0]["text"]
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
    assert "secret" not in out.getvalue() and made not in out.getvalue()
    first = next(line for line in lines if line["event"] == "request")
    assert first["request"] == response.headers["x-request-id"] and first["route"] == PATH
    assert first["status"] == 200 and first["new_tokens"] == 24 and first["prompt_tokens"] > 0
    broken = next(line for line in lines if line["level"] == "error")
    assert broken["error"] == "KeyError" and broken["trace"]
    asyncio.run(engine.close())


# The end.


class Stopped:
    """An engine that was told to stop."""

    alive = False

    def submit(self, asks: object) -> Any:
        raise ShuttingDown

    def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0)


def test_a_server_that_stops_says_so(llm: LLM) -> None:
    app = create_app(llm, Stopped(), "tiny")  # type: ignore[arg-type]
    response = ask(app, PATH, {"prompt": "x"})
    assert "stopping" in refused(response, 503) and response.headers["retry-after"]
    assert "stopped" in refused(ask(app, "/health"), 503)


def test_each_key_has_its_own_scope(guarded: ASGIApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """So nobody learns by timing what another has asked; and without keys there is one."""
    seen: list[str] = []
    engine, plain = guarded.state.service.engine, Worker.submit  # type: ignore[attr-defined]
    monkeypatch.setattr(engine, "submit", lambda asks: (seen.extend(a.scope for a in asks), plain(engine, asks))[1])
    for key in (KEY, OTHER, KEY):
        ask(guarded, PATH, {"prompt": "x", "max_tokens": 1}, headers={"authorization": f"Bearer {key}"})
    assert seen[0] == seen[2] != seen[1] and KEY not in "".join(seen)

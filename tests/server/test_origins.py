"""The Host and Origin headers: which pages may ask, and which may read."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.helpers.asgi_client import ask
from tests.helpers.guarded_app import KEY, echo, send_to
from triforce.errors import RequestError
from triforce.llm import LLM
from triforce.server.access import checked_origins, require_hosts
from triforce.server.app import create_app
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits
from triforce.server.security import HostCheck


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        *[(name, True) for name in ("localhost", "LOCALHOST:8000", "127.0.0.1:80", "[::1]:8000", "10.1.2.3")],
        *[(name, True) for name in ("gpu.example.org", "gpu.example.org.:8000")],
        *[(name, False) for name in ("evil.example.org", "localhost.evil.org", "", "127.0.0.1.evil.org", "[evil]")],
    ],
)
def test_host_header_must_name_server(guarded: ASGIApp, host: str, is_known: bool) -> None:
    assert ask(guarded, "/health", headers={"host": host}).status_code == (200 if is_known else 400)


def test_cors_named_origins_are_allowed(llm: LLM, app: ASGIApp) -> None:
    """A browser asks first, without the key; the answer comes with it, refusals too. No origin is named by default."""
    page = "https://notes.example.org"
    asks = {"origin": page, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    engine = Worker(llm, Limits(waiting=1))
    opened = create_app(llm, engine, "tiny", keys=[KEY], origins=[page])
    body = {"prompt": "the cat", "max_tokens": 1, "verbosity": "low"}

    def allowed(app: ASGIApp, origin: str, **headers: str) -> tuple[int, str | None]:
        answer = ask(app, "/v1/completions", body, headers={"origin": origin, **headers})
        return answer.status_code, answer.headers.get("access-control-allow-origin")

    async def preflight(app: ASGIApp, origin: str, **headers: str) -> tuple[int, str | None]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            answer = await client.options("/v1/completions", headers=asks | {"origin": origin} | headers)
            if headers:
                return answer.status_code, answer.headers.get("access-control-allow-private-network")
            return answer.status_code, answer.headers.get("access-control-allow-origin")

    assert asyncio.run(preflight(opened, page)) == (200, page)
    assert asyncio.run(preflight(opened, "https://evil.example"))[1] is None
    assert asyncio.run(preflight(app, page))[1] is None
    private = {"access-control-request-private-network": "true"}
    assert asyncio.run(preflight(opened, page, **private)) == (200, "true")
    assert asyncio.run(preflight(opened, "https://evil.example", **private)) == (403, None)
    assert allowed(opened, page, authorization=f"Bearer {KEY}") == (200, page)
    assert allowed(opened, page) == (401, page) and allowed(app, page) == (200, None)
    asyncio.run(engine.close())


@pytest.mark.parametrize(
    "origin",
    [
        *("example.org", "https://", "https://a b", "https://a.org/page", "https://a.org/", "file://", "null", ""),
        *("https://*.example.org", "https://*", "https://a.org:65536", "https://me@a.org", "https://münchen.example"),
    ],
)
def test_cors_origin_that_no_browser_sends_raises(origin: str) -> None:
    with pytest.raises(RequestError, match="is no origin of pages; give --cors-origin once for each origin"):
        checked_origins(["https://example.org", origin])


@pytest.mark.parametrize(
    ("origin", "sent"),
    [
        *[(o, o) for o in ("*", "http://localhost:3000", "http://[::1]:3000", "https://a.org:80", "http://a.org:443")],
        *[(o, o) for o in ("chrome-extension://abcd", "tauri://localhost", "app://obsidian.md", "https://my_host")],
        *[("https://example.org:443", "https://example.org"), ("http://example.org:80", "http://example.org")],
        *[("HTTPS://Example.org", "https://example.org"), ("https://a.org:0443", "https://a.org")],
    ],
)
def test_cors_origin_is_taken_as_browsers_send_it(origin: str, sent: str) -> None:
    assert checked_origins([origin]) == [sent]


@pytest.mark.parametrize("name", ["*", "http://a.b", "c.d:8414", "*.g.h", "", "a b", "a.b/c", "a..b", "-a", "[::1]"])
def test_allowed_host_that_never_matches_raises(name: str) -> None:
    require_hosts(["gpu.example.org", "gpu.example.org.", "my_host", "10.1.2.3", "::1", "a"])
    with pytest.raises(RequestError, match="is no name of a host; give --allowed-host"):
        require_hosts([name])


def test_request_without_exactly_one_host_is_400() -> None:
    for hosts, message in (([], b"no Host header;"), ([b"localhost", b"localhost"], b"2 Host headers")):
        status, body = send_to(HostCheck(echo, []), headers=[(b"host", host) for host in hosts])
        assert status == 400 and message in body


@pytest.mark.parametrize(
    ("target", "path"),
    [
        *[("http://localhost:8701/health", "/health"), ("HTTP://127.0.0.1/v1/models", "/v1/models")],
        *[("https://localhost", "/"), ("http://gpu.example.org/a?b", "/a?b")],
        *[(f"http://{host}/health", None) for host in ("evil.example.org", "me@localhost", "")],
    ],
)
def test_absolute_target_names_host_and_path(target: str, path: str | None) -> None:
    """The host of an absolute target overrides the Host header (RFC 9112, 3.2.2)."""

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    checked = HostCheck(told, ["gpu.example.org"])
    for hosts in ([], [(b"host", b"localhost")], [(b"host", b"evil.example.org")]):
        status, body = send_to(checked, path=target, headers=hosts)
        assert status == (400 if path is None else 200)
        assert body == (path or "").encode() or b"names another server as its host" in body


def test_health_is_told_without_a_host_header_alone() -> None:
    """Load balancers check health by HTTP/1.0 without a Host header; a page in a browser always sends one."""
    for path in ("/health", "/ping"):
        assert send_to(HostCheck(echo, []), path=path)[0] == 200
        assert send_to(HostCheck(echo, []), path=path, headers=[(b"host", b"evil.example.org")])[0] == 400


def test_cors_other_sites_read_nothing(app: ASGIApp) -> None:
    headers = {"origin": "https://evil.example.org", "access-control-request-method": "POST"}
    response = ask(app, "/v1/models", headers=headers)
    assert not [name for name in response.headers if name.startswith("access-control")]

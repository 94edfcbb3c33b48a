"""API keys: where they come from, how they are compared, and that each has a scope of its own."""

from __future__ import annotations

import hmac
from pathlib import Path

import pytest
from starlette.types import ASGIApp

from tests.helpers.asgi_client import ask, good, refused
from tests.helpers.guarded_app import KEY, OTHER, PATH
from triforce.cli import main
from triforce.errors import RequestError
from triforce.server import security
from triforce.server.access import KEYS_VARIABLE, read_keys, require_key_beyond_loopback
from triforce.server.engine_thread import Worker


def test_api_key_needed_on_every_route_but_health(guarded: ASGIApp) -> None:
    assert good(ask(guarded, "/health")) == good(ask(guarded, "/health/")) == {"status": "ok"}
    for path in (PATH, "/v1/models", "/metrics", "/tokenize", "/openapi.json", "/nowhere", "/docs"):
        response = ask(guarded, path)
        assert "Authorization: Bearer" in refused(response, 401) and response.headers["www-authenticate"] == "Bearer"
        assert ask(guarded, path, headers={"authorization": f"Bearer {KEY}"}).status_code != 401


@pytest.mark.parametrize(
    "sent", [KEY, f"Basic {KEY}", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", "Bearer", "Bearer é", ""]
)
def test_api_key_wrong_is_401(guarded: ASGIApp, sent: str) -> None:
    assert ask(guarded, "/v1/models", headers={"authorization": sent.encode("latin-1")}).status_code == 401


def test_api_key_may_come_as_header_of_its_own(guarded: ASGIApp) -> None:
    """As Anthropic's clients send it. A bearer token wins where both are sent."""
    assert ask(guarded, "/v1/models", headers={"x-api-key": KEY}).status_code == 200
    assert ask(guarded, "/v1/models", headers={"x-api-key": f"{KEY}x"}).status_code == 401
    both = {"x-api-key": KEY, "authorization": "Bearer wrong"}
    assert ask(guarded, "/v1/models", headers=both).status_code == 401


def test_api_keys_compared_in_constant_time(guarded: ASGIApp, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[tuple[int, int]] = []
    plain = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        lengths.append((len(a), len(b)))
        return plain(a, b)

    monkeypatch.setattr(security.hmac, "compare_digest", compare)
    for key in (KEY, "x"):
        ask(guarded, "/v1/models", headers={"authorization": f"Bearer {key}"})
    assert lengths == [(32, 32)] * 4  # digests: not even the length of a key tells


def test_lines_of_a_key_file_are_comments_and_named_in_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    file = tmp_path / "keys"
    file.write_text(f"# a comment of the team\n{KEY}\n  # another one, indented\n")
    assert read_keys(str(file)) == [KEY]
    file.write_text(f"# keys\n{KEY}\nshort\n")
    with pytest.raises(RequestError, match=f"^line 3 of {file} is no key"):
        read_keys(str(file))
    file.write_text("# a comment and nothing else\n")
    with pytest.raises(RequestError, match="has no key in it"):
        read_keys(str(file))
    monkeypatch.setenv(KEYS_VARIABLE, f"{KEY},short")
    with pytest.raises(RequestError, match=f"^key 2 of {KEYS_VARIABLE} is no key"):
        read_keys(None)


def test_api_keys_from_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5"])
def test_public_address_without_key_does_not_start(
    host: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    assert main(["serve", "--host", host, "--port", "0"]) == 2
    assert "--api-key-file" in capsys.readouterr().err
    for name in (host, "example.org"):
        require_key_beyond_loopback(name, [KEY])
        with pytest.raises(RequestError, match="--api-key-file"):
            require_key_beyond_loopback(name, [])


def test_loopback_address_needs_no_key() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        require_key_beyond_loopback(host, [])


def test_api_key_has_own_prefix_scope(guarded: ASGIApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key has a prefix scope, so timing tells nothing of another key's prompts. A server without keys has one."""
    scopes: list[str] = []
    engine, plain = guarded.state.service.engine, Worker.submit  # type: ignore[attr-defined]
    monkeypatch.setattr(engine, "submit", lambda asks: (scopes.extend(a.scope for a in asks), plain(engine, asks))[1])
    for key in (KEY, OTHER, KEY):
        ask(guarded, PATH, {"prompt": "x", "max_tokens": 1}, headers={"authorization": f"Bearer {key}"})
    assert scopes[0] == scopes[2] != scopes[1] and KEY not in "".join(scopes)

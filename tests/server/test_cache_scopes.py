"""Scopes of a server's disk cache: by key, by salt, and none for requests that opt out."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from tests.helpers.asgi_client import ask, good, refused
from tests.helpers.disk_llm import written
from tests.helpers.guarded_app import KEY, OTHER, PATH
from triforce.disk_cache import prefixes
from triforce.llm import LLM
from triforce.server import logs
from triforce.server.app import create_app
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits

PROMPT = "It was the best of times, it was the worst of times. " * 22


class Server:
    """A server with a disk cache, that has just started."""

    def __init__(self, pair: Path, cache: Path) -> None:
        self.llm = LLM(pair / "target", pair / "draft", disk_cache=cache)
        self.worker = Worker(self.llm, Limits())
        self.app: ASGIApp = create_app(self.llm, self.worker, "tiny", keys=[KEY, OTHER])

    def ask(self, key: str = KEY, **body: Any) -> dict[str, Any]:
        body = {"prompt": PROMPT, "max_tokens": 4, "seed": 5, "ignore_eos": True} | body
        return good(ask(self.app, PATH, body, headers={"authorization": f"Bearer {key}"}))

    def stop(self) -> None:
        asyncio.run(self.worker.close())
        written(self.llm)


@pytest.fixture
def cache(tmp_path: Path, pair: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk cache in which KEY has left PROMPT."""
    monkeypatch.setattr(prefixes, "perf_counter", lambda: 0.0)
    server = Server(pair, tmp_path / "cache")
    assert cached(server.ask()) == 0
    server.stop()
    yield tmp_path / "cache"


def cached(answer: dict[str, Any]) -> int:
    cached_count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached_count


def stable_answer(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without the number and the time of its request."""
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


def test_key_finds_its_prompt_after_restart_and_another_does_not(cache: Path, pair: Path) -> None:
    """Another key gets the answer of a fresh server: the same text and the same usage."""
    server = Server(pair, cache)
    never = Server(pair, cache.with_name("never"))
    foreign = server.ask(OTHER)
    own_answer = server.ask(KEY)
    assert stable_answer(foreign) == stable_answer(never.ask(OTHER))
    assert cached(own_answer) >= 512 and own_answer["choices"] == foreign["choices"]
    for host in (server, never):
        host.stop()


def test_salt_separates_requests_of_a_key(cache: Path, pair: Path) -> None:
    server = Server(pair, cache)
    assert [cached(server.ask(cache_salt=salt)) > 0 for salt in ("a", "b", "a")] == [False, False, True]
    server.stop()
    again = Server(pair, cache)
    assert cached(again.ask(cache_salt="b")) >= 512
    again.stop()


def test_request_kept_out_finds_and_leaves_nothing(cache: Path, pair: Path) -> None:
    server = Server(pair, cache)
    files_before = sorted(cache.glob("*.kv"))
    answers = [server.ask(cache=False, prompt=prompt) for prompt in (PROMPT, PROMPT, "x" + PROMPT, "x" + PROMPT)]
    assert [cached(answer) for answer in answers] == [0] * 4
    server.stop()
    assert sorted(cache.glob("*.kv")) == files_before


def test_reason_for_reading_again_is_told_in_usage_and_log(
    cache: Path, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions and counts, and no text."""
    out = io.StringIO()
    server = Server(pair, cache)
    handler = logging.StreamHandler(out)
    handler.setFormatter(logs.JsonLines())
    monkeypatch.setattr(logs.LOG, "handlers", [handler])
    logs.LOG.setLevel(logging.INFO)
    changed = PROMPT[:300] + "secret " + PROMPT[300:]
    (reason,) = server.ask(prompt=changed, tier_stats=True)["usage"]["reread"]
    server.stop()
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert "it differs from recent texts" in reason and "secret" not in out.getvalue()
    assert [line["reread"] for line in lines if line["event"] == "request"] == [[reason]]


def test_no_key_nor_digest_is_on_disk(cache: Path) -> None:
    from hashlib import sha256

    stored = b"".join(file.read_bytes() + file.name.encode() for file in cache.iterdir())
    digest = sha256(KEY.encode()).digest()
    assert not any(secret in stored for secret in (KEY.encode(), digest, digest.hex().encode(), PROMPT[:40].encode()))


@pytest.mark.parametrize("body", [{"cache_salt": 7}, {"cache_salt": "x" * 257}, {"cache": "no"}])
def test_bad_cache_fields_are_refused(guarded: ASGIApp, body: dict[str, Any]) -> None:
    request = {"prompt": "x", "max_tokens": 1} | body
    refused(ask(guarded, PATH, request, headers={"authorization": f"Bearer {KEY}"}))

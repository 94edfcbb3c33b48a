"""Requests meant to break a real process: none is answered with 5xx, none leaves pages behind, and it goes on."""

from __future__ import annotations

import json
import random
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any
from unittest import SkipTest

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from tests.helpers.server_process import KEY, served, wait_until_idle
from tests.helpers.tiny_checkpoint import tiny_pair

HEADERS = {"authorization": f"Bearer {KEY}"}
PATHS = [
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"),
    *("/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/generate"),
]
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a short context, so that valid requests take little time. At the end the server is as at the start."""
    small = tiny_pair(tmp_path_factory.mktemp("small"), positions=128, chat_template=TEMPLATE)
    with served(small, "--max-body", "0.25") as (process, url):
        httpx.post(f"{url}/v1/completions", json={"prompt": "the cat"}, headers=HEADERS, timeout=60)
        yield url
        wait_until_idle(url)
        assert process.poll() is None
        assert process.stderr
        log = [json.loads(line) for line in process.stderr.read().splitlines() if line[:1] == "{"]
        assert len(log) > 1 and not [line for line in log if line["level"] not in ("info", "warning")]


def schemathesis_requests(url: str, examples: int) -> int:
    """Send valid and invalid requests generated from the server's OpenAPI schema. Returns their count."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    described = schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json", headers=HEADERS).json())
    sent = 0
    for operation in described.get_all_operations():
        for mode in schemathesis.GenerationMode:
            cases = operation.ok().as_strategy(generation_mode=mode)

            @settings(
                max_examples=examples,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=cases)
            def ask(case: Any) -> None:
                nonlocal sent
                sent += 1
                assert case.call(base_url=url, headers=HEADERS, timeout=60).status_code < 500

            with suppress(Unsatisfiable, SkipTest):  # where there is nothing to be wrong about
                ask()
    return sent


def bad_bodies(chance: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield the body of each kind of mistake or attack, and the name of the kind."""
    good = json.dumps({"prompt": "the cat", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}).encode()
    values: list[Any] = [None, True, -1, 1e308, 10**40, "", "x", [], {}, [[]], {"a": {}}, "\ud800", [None] * 9]
    fields = ["prompt", "messages", "max_tokens", "n", "stop", "seed", "stream", "logit_bias", "response_format"]
    fields += ["temperature", "tools", "tool_choice", "model", "mode", "echo", "logprobs", "stream_options", "trace"]
    fields += ["input", "system", "thinking", "output_config", "stop_sequences", "options", "format", "think", "raw"]
    while True:
        depth = chance.choice([10, 1000, 100_000])
        yield "deep arrays", b'{"prompt": ' + b"[" * depth + b"]" * (depth if chance.random() < 0.5 else 0) + b"}"
        yield "deep objects", b'{"response_format":' * min(depth, 10_000) + b"1" + b"}" * min(depth, 10_000)
        yield "noise", chance.randbytes(chance.randrange(200))
        yield "invalid UTF-8", good.replace(b"cat", chance.choice([b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\x00"]))
        yield "cut short", good[: chance.randrange(len(good))]
        yield "too large", b'{"prompt": "' + b"a" * chance.choice([2**18, 2**20]) + b'"}'
        yield (
            "no number",
            good.replace(b": 2", b": " + chance.choice([b"NaN", b"-Infinity", b"1e999", b"0x10", b"9" * 5000])),
        )
        field = chance.choice(fields)
        yield "twice", good[:-1] + b"," + good[1:]
        wrong = {"prompt": "the cat", "max_tokens": 2, field: chance.choice(values)}
        yield "wrong type", json.dumps(wrong).encode()
        yield (
            "wrong inside",
            json.dumps(wrong | {field: {"type": "json_schema", "json_schema": chance.choice(values)}}).encode(),
        )
        yield "wide", json.dumps({str(i): i for i in range(2000)}).encode()


def hostile_requests(url: str, count: int, seed: int = 0) -> int:
    """Send `count` invalid requests, four at a time; return the count."""
    chance = random.Random(seed)
    kinds = bad_bodies(chance)
    types = ["application/json", "application/json; charset=utf-16", "text/plain", "multipart/form-data", "\xff"]

    def ask(work: tuple[str, str, bytes, str]) -> int:
        path, kind, body, content_type = work
        headers = HEADERS | {"content-type": content_type.encode("latin-1")}
        status = web.post(path, content=body, headers=headers).status_code
        assert status < 500, (status, path, kind, content_type, body[:300])
        return status

    def work() -> tuple[str, str, bytes, str]:
        kind, body = next(kinds)
        return chance.choice(PATHS), kind, body, chance.choice(types[:1] * 6 + types)

    with httpx.Client(base_url=url, timeout=120) as web, ThreadPoolExecutor(4) as several:
        statuses = Counter(several.map(ask, [work() for _ in range(count)]))
    assert statuses[400] > count / 4 and statuses[413] > count / 50, statuses
    return count


def slow_clients(url: str, count: int) -> int:
    """Connect clients that send a part of a request, or never read the answer; serve other clients meanwhile."""
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n".encode()
    body = json.dumps({"prompt": "the cat", "max_tokens": 100, "ignore_eos": True, "stream": True}).encode()
    request_bytes = head + f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    endings = [b"", b"Content-Length: 50\r\n\r\n{", b"Content-Length: 50\r\n\r\n", b"X: " + b"y" * 9000]
    connections = [socket.create_connection((host, int(port)), timeout=60) for _ in range(count)]
    for i, connection in enumerate(connections):
        connection.sendall(request_bytes if i % 5 == 4 else head[: 20 + i] if i % 7 == 6 else head + endings[i % 4])
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "the cat"}, headers=HEADERS, timeout=120)
    assert answer.status_code == 200
    for connection in connections:
        with closing(connection):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # goes without a word
    return count


def test_hostile_schema_requests_get_no_5xx(url: str) -> None:
    assert schemathesis_requests(url, 12) > 100
    wait_until_idle(url)


def test_hostile_requests_get_no_5xx(url: str) -> None:
    hostile_requests(url, 220)
    wait_until_idle(url)


def test_hostile_slow_clients_block_nobody(url: str) -> None:
    slow_clients(url, 30)
    wait_until_idle(url)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's")
def test_hostile_descriptor_exhaustion_recovers(url: str) -> None:
    """Half-sent headers take all descriptors, fewer than the bound on connections. Waiting connections give way."""
    server = next(p for p in psutil.Process().children() if "serve" in p.cmdline())
    soft, hard_limit = server.rlimit(psutil.RLIMIT_NOFILE)
    host, port = url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        stack.callback(server.rlimit, psutil.RLIMIT_NOFILE, (soft, hard_limit))
        server.rlimit(psutil.RLIMIT_NOFILE, (server.num_fds() + 20, hard_limit))
        for _ in range(100):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localh")
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        counted = httpx.get(f"{url}/metrics", headers=HEADERS).text
        assert 'event="no_descriptors"' in counted and 'event="gave_way"' in counted


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_hostile_ten_thousand_requests_keep_memory_flat(url: str) -> None:
    """Memory does not grow with a second run of as many requests."""
    server = next(p for p in psutil.Process().children() if "serve" in p.cmdline())
    sent = schemathesis_requests(url, 200) + hostile_requests(url, 2500) + slow_clients(url, 100)
    wait_until_idle(url)
    rss_before = server.memory_info().rss
    sent += hostile_requests(url, max(10_000 - sent, 2500), seed=1)
    wait_until_idle(url)
    assert sent >= 10_000 and server.memory_info().rss < rss_before * 1.05


def test_hostile_broken_server_is_detected(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = httpx.Client.post

    def post(web: httpx.Client, path: str, **options: Any) -> httpx.Response:
        answer = plain(web, path, **options)
        return httpx.Response(500) if b"NaN" in options["content"] else answer

    monkeypatch.setattr(httpx.Client, "post", post)
    with pytest.raises(AssertionError, match="500"):
        hostile_requests(url, 220)

"""Limits of connections: for each address, in all, and by the descriptors that there are."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import resource
import socket
import time
from typing import Any

import pytest

from tests.helpers.connections import HALF, HEAD, Scene, scene, several_addresses
from triforce.cli import main
from triforce.errors import RequestError
from triforce.server import http_server, logs
from triforce.server.http_server import network
from triforce.server.limits import CONNECTIONS, Limits, connection_limit


def test_address_limit_closes_waiting_connections() -> None:
    async def play(scene: Scene) -> None:
        halves = [await scene.connect(HALF) for _ in range(5)]
        assert await scene.ask() == b"HTTP/1.1 200 OK\r\n"
        assert (await halves[0][0].readline()).startswith(b"HTTP/1.1 408") and "gave_way" in scene.events()
        waiting = [await scene.connect(HEAD % b"wait") for _ in range(3)]
        await scene.until(lambda: scene.held == 3)
        reader, _ = await scene.connect(HEAD % b"quick")
        answer = (await reader.read()).decode()
        assert answer.startswith("HTTP/1.1 429") and "retry-after" in answer and "connection: close" in answer
        body = json.loads(answer.partition("\r\n\r\n")[2])
        assert "--max-connections-per-address" in body["error"]["message"] and "refused" in scene.events()
        scene.release.set()
        assert [(await reader.readline())[9:12] for reader, _ in waiting] == [b"200"] * 3

    scene(play, connections_per_address=3)


@several_addresses
def test_full_address_leaves_others_served() -> None:
    async def play(scene: Scene) -> None:
        for _ in range(3):
            await scene.connect(HEAD % b"wait")
        await scene.until(lambda: scene.held == 3)
        assert b"429" in await scene.ask() and b"200" in await scene.ask(address="127.0.0.2")

    scene(play, connections_per_address=3)


@several_addresses
def test_half_headers_of_many_addresses_lock_nobody_out() -> None:
    async def play(scene: Scene) -> None:
        for i in range(40):
            await scene.connect(HALF, f"127.0.0.{2 + i % 20}")
        assert b"200" in await scene.ask()
        await scene.until(lambda: "gave_way" in scene.events())
        assert len(scene.server.server_state.connections) <= 8

    scene(play, connections=8)


@several_addresses
def test_accepting_pauses_while_all_are_answered() -> None:
    async def play(scene: Scene) -> None:
        for i in range(4):
            await scene.connect(HEAD % b"wait", f"127.0.0.{i + 2}")
        await scene.until(lambda: scene.held == 4)
        late_request = asyncio.create_task(scene.ask())
        await scene.until(lambda: "paused" in scene.events())
        assert len(scene.server.server_state.connections) == 4 and not late_request.done()
        scene.release.set()
        assert b"200" in await late_request

    scene(play, connections=4)


def test_exhausted_descriptors_log_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    failures = 50
    handler = logging.StreamHandler(out)
    handler.setFormatter(logs.JsonLines())
    monkeypatch.setattr(logs.LOG, "handlers", [handler])
    logs.LOG.setLevel(logging.INFO)
    monkeypatch.setattr(http_server, "PAUSE_SECONDS", 0.001)
    plain = asyncio.SelectorEventLoop.sock_accept

    async def accept(loop: Any, sock: socket.socket) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(errno.EMFILE if failures % 2 else errno.ECONNABORTED, "")
        return await plain(loop, sock)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", accept)

    async def play(scene: Scene) -> None:
        assert b"200" in await scene.ask()
        await scene.until(lambda: '"connections"' in out.getvalue())

    start = time.monotonic()
    scene(play)
    lines = [json.loads(line) for line in out.getvalue().splitlines() if '"connections"' in line]
    assert 0 < len(lines) <= time.monotonic() - start + 1
    assert sum(line["no_descriptors"] for line in lines) == sum(line["paused"] for line in lines) == 25


def test_connection_limit_leaves_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert (
        connection_limit(None) == connection_limit(192) == 192
        and Limits(connections=192).connections_of_one_address == 96
    )
    with pytest.raises(RequestError, match="give 192 at most"):
        connection_limit(193)
    for limit in (65536, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert connection_limit(None) == CONNECTIONS and connection_limit(40_000) == 40_000


@pytest.mark.parametrize("name", ["--max-connections", "--max-connections-per-address"])
def test_connection_limit_of_zero_exits_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "nowhere", name, "0"]) == 2
    assert f"{name} 0: give 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "counted"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::9", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_connections_are_counted_by_network(host: str, counted: str) -> None:
    assert network(host) == counted

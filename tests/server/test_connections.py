"""Connections on a real socket: what they may keep others from, for how long, and how many there may be."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import resource
import socket
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import Response
from uvicorn.server import ServerState

from triforce.cli import main
from triforce.errors import RequestError
from triforce.server import door, http_server, logs
from triforce.server.app import AccessLog
from triforce.server.connections import Connection, places
from triforce.server.door import network
from triforce.server.engine_client import EngineLoad
from triforce.server.limits import CONNECTIONS, Limits
from triforce.server.metrics import Metrics
from triforce.server.sse import EventStream

HEAD = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF = HEAD[:25]
several_addresses = pytest.mark.skipif(sys.platform != "linux", reason="this machine is 127.0.0.1 only")


class Scene:
    """A server of its own, with four addresses: /quick, /large, /wait until `release` is set, and /endless."""

    def __init__(self, **limits: Any) -> None:
        self.release, self.held, self.app = asyncio.Event(), 0, FastAPI()
        engine: Any = SimpleNamespace(load=lambda: EngineLoad(0, 0, 0), failure=None)
        self.metrics = Metrics(engine, "tiny")
        self.app.state.service = SimpleNamespace(limits=Limits(**limits), metrics=self.metrics)
        self.app.add_middleware(AccessLog)
        for route in (self.quick, self.large, self.wait, self.endless):
            self.app.get(f"/{route.__name__}")(route)
        self.server = http_server.Server(self.app, engine, shutdown_timeout=1)

    async def quick(self) -> str:
        return "done"

    async def large(self) -> Response:
        return Response(bytes(2**20))

    async def wait(self) -> str:
        self.held += 1
        await self.release.wait()
        return "released"

    async def endless(self) -> EventStream:
        async def much() -> AsyncGenerator[bytes, None]:
            while True:
                yield bytes(2**20)
                await asyncio.sleep(0)

        return EventStream(much(), self.release.set, {})

    async def connect(self, sent: bytes, address: str = "127.0.0.1") -> tuple[asyncio.StreamReader, Any]:
        reader, writer = await asyncio.open_connection(*self.address, local_addr=(address, 0))
        self.opened.append(writer)
        writer.write(sent)
        return reader, writer

    async def ask(self, path: bytes = b"quick", address: str = "127.0.0.1") -> bytes:
        """The first line of the answer."""
        return await (await self.connect(HEAD % path, address))[0].readline()

    def events(self) -> set[str]:
        """What was counted."""
        lines = self.metrics.text().decode().splitlines()
        return {line.split('"')[1] for line in lines if line.startswith("triforce:connection_events_total")}

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        self.opened: list[asyncio.StreamWriter] = []
        with http_server.listen("127.0.0.1", 0) as sock:
            self.address = sock.getsockname()
            serving = asyncio.create_task(self.server.serve([sock]))
            await self.until(lambda: self.server.started)
            try:
                yield
            finally:
                for writer in self.opened:
                    writer.close()
                self.release.set()
                self.server.should_exit = True
                await serving


def scene(play: Callable[[Scene], Awaitable[None]], **limits: Any) -> None:
    """Play it, and see that it ends."""

    async def whole() -> None:
        it = Scene(**limits)
        async with asyncio.timeout(60), it.run():
            await play(it)

    asyncio.run(whole())


# Deadlines.


def test_headers_have_a_deadline_however_they_trickle() -> None:
    async def play(it: Scene) -> None:
        reader, writer = await it.connect(HALF)

        async def trickle() -> None:
            with suppress(ConnectionError):
                while True:
                    writer.write(b"x")
                    await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        trickling.cancel()
        assert "headers_late" in it.events() and await it.ask() == b"HTTP/1.1 200 OK\r\n"

    scene(play, header_seconds=0.2)


@pytest.mark.parametrize(
    "before",
    [
        b"",
        HEAD % b"quick",
        b"POST /quick HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{",
        b"POST /quick HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1",
    ],
)
def test_who_asks_no_more_is_hung_up_on(before: bytes) -> None:
    """One that never asked, one that did, and those that do not end a body which nobody waits for."""

    async def play(it: Scene) -> None:
        reader, _ = await it.connect(before)
        assert (await reader.read()).count(b"HTTP/1.1 ") == bool(before) and it.events() == {"headers_late"}

    scene(play, header_seconds=0.2)


def test_a_second_request_has_a_deadline_of_its_own_and_one_that_is_answered_has_none() -> None:
    async def play(it: Scene) -> None:
        reader, writer = await it.connect(HEAD % b"wait")
        await it.until(lambda: it.held == 1)
        idle, _ = await it.connect(b"")
        assert await idle.read() == b""  # so the time of the first is over, too
        it.release.set()
        assert (await reader.readuntil(b'"released"')).startswith(b"HTTP/1.1 200")
        writer.write(HALF)
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")

    scene(play, header_seconds=0.2)


def test_an_answer_must_be_read() -> None:
    """What makes it is told that the client is gone."""

    async def play(it: Scene) -> None:
        with socket.create_connection(it.address[:2]) as client:
            client.sendall(HEAD % b"endless")
            await it.release.wait()
            assert it.events() == {"answer_not_read"}

    scene(play, stall_seconds=0.2, header_seconds=0.1)


@pytest.mark.parametrize("requests", [20, 1000])
def test_answers_that_ended_must_be_read_too(requests: int) -> None:
    """Requests one behind the other; of the many not even all fit into what the server reads ahead."""

    async def play(it: Scene) -> None:
        with socket.create_connection(it.address[:2]) as client:
            client.sendall(HEAD % b"large" * requests)
            await it.until(lambda: it.events() == {"answer_not_read"})
            await it.until(lambda: not it.server.server_state.connections)

    scene(play, stall_seconds=0.2)


class Still:
    """A clock, and a transport, that do as they are told."""

    def __init__(self) -> None:
        self.now, self.unsent, self.closing = 0.0, 0, False

    def time(self) -> float:
        return self.now

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closing


@pytest.mark.parametrize(
    ("complete", "paused", "closing", "left", "found"),
    [
        (False, False, False, [9] * 9, None),  # is written to
        (False, True, False, [9] * 9, "answer_not_read"),
        (False, True, False, [18, 17, 16, 15, 14, 13, 12, 11], None),  # is read, if slowly
        (False, False, True, [9] * 9, "answer_not_read"),  # went while it was answered
        (True, False, False, [9] * 9, "answer_not_read"),
        (True, False, False, [9, 8, 7, 6, 5, 4, 3, 2, 1, 0], None),
        (True, False, False, [0] * 9, "headers_late"),
    ],
)
def test_which_clients_are_late(complete: bool, paused: bool, closing: bool, left: list[int], found: str) -> None:
    still, limits = Still(), Limits(header_seconds=5, stall_seconds=5)
    config = uvicorn.Config(FastAPI(), log_config=None)
    settings: Any = {"config": config, "server_state": ServerState(), "app_state": {}, "_loop": still}
    connection: Any = Connection("127.0.0.1", limits, **settings)
    connection.transport, connection.flow = still, SimpleNamespace(write_paused=paused)
    connection.cycle, still.closing = SimpleNamespace(response_complete=complete), closing
    faults = []
    for still.now, still.unsent in enumerate(left):
        faults.append(connection.fault())
    assert faults[-1] == found and faults[0] is None


# How many.


def test_an_address_has_its_share_and_what_waits_gives_way() -> None:
    async def play(it: Scene) -> None:
        halves = [await it.connect(HALF) for _ in range(5)]
        assert await it.ask() == b"HTTP/1.1 200 OK\r\n"
        assert (await halves[0][0].readline()).startswith(b"HTTP/1.1 408") and "gave_way" in it.events()
        waiting = [await it.connect(HEAD % b"wait") for _ in range(3)]
        await it.until(lambda: it.held == 3)
        reader, _ = await it.connect(HEAD % b"quick")
        answer = (await reader.read()).decode()
        assert answer.startswith("HTTP/1.1 429") and "retry-after" in answer and "connection: close" in answer
        body = json.loads(answer.partition("\r\n\r\n")[2])
        assert "--max-connections-per-address" in body["error"]["message"] and "refused" in it.events()
        it.release.set()
        assert [(await reader.readline())[9:12] for reader, _ in waiting] == [b"200"] * 3

    scene(play, connections_per_address=3)


@several_addresses
def test_others_are_served_while_one_address_has_its_fill() -> None:
    async def play(it: Scene) -> None:
        for _ in range(3):
            await it.connect(HEAD % b"wait")
        await it.until(lambda: it.held == 3)
        assert b"429" in await it.ask() and b"200" in await it.ask(address="127.0.0.2")

    scene(play, connections_per_address=3)


@several_addresses
def test_half_headers_of_many_addresses_keep_nobody_out() -> None:
    async def play(it: Scene) -> None:
        for i in range(40):
            await it.connect(HALF, f"127.0.0.{2 + i % 20}")
        assert b"200" in await it.ask()
        await it.until(lambda: "gave_way" in it.events())
        assert len(it.server.server_state.connections) <= 8

    scene(play, connections=8)


@several_addresses
def test_accepting_pauses_while_all_are_being_answered() -> None:
    async def play(it: Scene) -> None:
        for i in range(4):
            await it.connect(HEAD % b"wait", f"127.0.0.{i + 2}")
        await it.until(lambda: it.held == 4)
        late = asyncio.create_task(it.ask())
        await it.until(lambda: "paused" in it.events())
        assert len(it.server.server_state.connections) == 4 and not late.done()
        it.release.set()
        assert b"200" in await late

    scene(play, connections=4)


def test_descriptors_that_run_out_are_one_line_of_log_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    out, failures = io.StringIO(), 50
    handler = logging.StreamHandler(out)
    handler.setFormatter(logs.JsonLines())
    monkeypatch.setattr(logs.LOG, "handlers", [handler])
    logs.LOG.setLevel(logging.INFO)
    monkeypatch.setattr(door, "MOMENT", 0.001)
    plain = asyncio.SelectorEventLoop.sock_accept

    async def accept(loop: Any, sock: socket.socket) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(errno.EMFILE if failures % 2 else errno.ECONNABORTED, "")
        return await plain(loop, sock)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", accept)

    async def play(it: Scene) -> None:
        assert b"200" in await it.ask()
        await it.until(lambda: '"connections"' in out.getvalue())

    begun = time.monotonic()
    scene(play)
    lines = [json.loads(line) for line in out.getvalue().splitlines() if '"connections"' in line]
    assert 0 < len(lines) <= time.monotonic() - begun + 1
    assert sum(line["no_descriptors"] for line in lines) == sum(line["paused"] for line in lines) == 25


def test_places_leave_descriptors_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert places(None) == places(192) == 192 and Limits(connections=192).places_of_an_address == 96
    with pytest.raises(RequestError, match="give --max-connections 192"):
        places(193)
    for much in (65536, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, much=much: (much, much))
        assert places(None) == CONNECTIONS and places(40_000) == 40_000


@pytest.mark.parametrize("name", ["--max-connections", "--max-connections-per-address"])
def test_a_bound_that_nobody_fits_in_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "nowhere", name, "0"]) == 2
    assert "not positive" in capsys.readouterr().err


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
def test_whom_a_connection_is_counted_for(host: str, counted: str) -> None:
    assert network(host) == counted

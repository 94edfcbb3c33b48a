"""Deadlines of connections: for headers, for the next request, and for reading an answer."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from tests.helpers.connections import HALF, HEAD, Scene, scene
from triforce.server.http_server import Connection
from triforce.server.limits import Limits


def test_trickling_headers_time_out() -> None:
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
def test_idle_connection_is_closed(before: bytes) -> None:
    """A connection without a request, one after a request, and two whose unfinished body the app does not read."""

    async def play(it: Scene) -> None:
        reader, _ = await it.connect(before)
        assert (await reader.read()).count(b"HTTP/1.1 ") == bool(before) and it.events() == {"headers_late"}

    scene(play, header_seconds=0.2)


def test_second_request_has_own_deadline_and_answered_one_none() -> None:
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


def test_unread_answer_is_aborted() -> None:
    """The handler of an unread answer is told that the client is gone."""

    async def play(it: Scene) -> None:
        with socket.create_connection(it.address[:2]) as client:
            client.sendall(HEAD % b"endless")
            await it.release.wait()
            assert it.events() == {"answer_not_read"}

    scene(play, stall_seconds=0.2, header_seconds=0.1)


@pytest.mark.parametrize("requests", [20, 1000])
def test_unread_pipelined_answers_are_aborted(requests: int) -> None:
    """Pipelined requests whose answers are not read are aborted, also if they exceed the server's read-ahead."""

    async def play(it: Scene) -> None:
        with socket.create_connection(it.address[:2]) as client:
            client.sendall(HEAD % b"large" * requests)
            await it.until(lambda: it.events() == {"answer_not_read"})
            await it.until(lambda: not it.server.server_state.connections)

    scene(play, stall_seconds=0.2)


class Still:
    """A clock and a transport that the test sets."""

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
def test_late_clients_are_found_by_clock(
    complete: bool, paused: bool, closing: bool, left: list[int], found: str
) -> None:
    still, limits = Still(), Limits(header_seconds=5, stall_seconds=5)
    config = uvicorn.Config(FastAPI(), log_config=None)
    settings: Any = {"config": config, "server_state": ServerState(), "app_state": {}, "_loop": still}
    connection: Any = Connection("127.0.0.1", limits, **settings)
    connection.transport, connection.flow = still, SimpleNamespace(write_paused=paused)
    connection.cycle, still.closing = SimpleNamespace(response_complete=complete), closing
    faults = []
    for still.now, still.unsent in enumerate(left):
        faults.append(connection.missed_deadline())
    assert faults[-1] == found and faults[0] is None

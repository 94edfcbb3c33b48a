"""A server on a real socket, and clients that are slow, silent or many."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import Response

from tests.helpers.idle_writer import IdleWriter
from triforce.server import http_server
from triforce.server.access import listen
from triforce.server.engine_client import EngineLoad
from triforce.server.limits import Limits
from triforce.server.logs import AccessLog
from triforce.server.metrics import Metrics
from triforce.server.service import EventStream

HEAD = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF = HEAD[:25]
several_addresses = pytest.mark.skipif(sys.platform != "linux", reason="this machine is 127.0.0.1 only")


class Scene:
    """A server of its own, with four addresses: /quick, /large, /wait until `release` is set, and /endless."""

    def __init__(self, **limits: Any) -> None:
        self.release = asyncio.Event()
        self.held = 0
        self.app = FastAPI()
        engine: Any = SimpleNamespace(load=lambda: EngineLoad(0, 0, 0), failure=None, close=self.close)
        self.metrics = Metrics(engine, "tiny")
        self.app.state.service = SimpleNamespace(limits=Limits(**limits), metrics=self.metrics)
        self.app.add_middleware(AccessLog)
        for route in (self.quick, self.large, self.wait, self.endless):
            self.app.get(f"/{route.__name__}")(route)
        self.server = http_server.Server(self.app, engine, shutdown_timeout=1)

    async def close(self) -> None:
        """Close nothing: there is no engine."""

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

        return EventStream(much(), IdleWriter(), self.release.set, {})

    async def connect(self, sent: bytes, address: str = "127.0.0.1") -> tuple[asyncio.StreamReader, Any]:
        reader, writer = await asyncio.open_connection(*self.address, local_addr=(address, 0))
        self.opened.append(writer)
        writer.write(sent)
        return reader, writer

    async def ask(self, path: bytes = b"quick", address: str = "127.0.0.1") -> bytes:
        """Return the first line of the answer."""
        return await (await self.connect(HEAD % path, address))[0].readline()

    def events(self) -> set[str]:
        """Return the names of the counted connection events."""
        lines = self.metrics.text().decode().splitlines()
        return {line.split('"')[1] for line in lines if line.startswith("triforce:connection_events_total")}

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        self.opened: list[asyncio.StreamWriter] = []
        with listen("127.0.0.1", 0) as sock:
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
    """Run `play` on a server; assert that it ends within 60 seconds."""

    async def whole() -> None:
        server_scene = Scene(**limits)
        async with asyncio.timeout(60), server_scene.run():
            await play(server_scene)

    asyncio.run(whole())

"""The HTTP server on a socket, until the process is told to stop."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from triforce.server import logs
from triforce.server.connections import Connection, Connections, accept
from triforce.server.engine_client import EngineClient
from triforce.server.service import Service

_LAST_WORDS = 1.0
"""Seconds in which answers end that a second signal has cut off."""
_SLACK = 5
"""Seconds beyond the shutdown timeout in which answers that were ended reach their clients."""
AGAIN = "requests that run are answered first; press Ctrl-C again to end at once"
TWICE = 0.5
"""Seconds in which two signals are one: a service manager may tell a process and who started it, which passes it on."""


def serve(app: FastAPI, engine: EngineClient, sock: socket.socket, shutdown_timeout: float) -> None:
    """Answer until SIGTERM, SIGHUP or SIGINT. Requests that run then have `shutdown_timeout` seconds; none starts.

    Raises what has ended the engine, if it was not that.
    """
    asyncio.run(Server(app, engine, shutdown_timeout).serve([sock]))
    if engine.failure:
        raise engine.failure


class Server(uvicorn.Server):
    """Bounds connections, and stops the engine on a signal. That is a success, not a death by signal."""

    def __init__(self, app: FastAPI, engine: EngineClient, shutdown_timeout: float) -> None:
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=int(shutdown_timeout) + _SLACK,
        )
        super().__init__(config)
        self._engine, self._shutdown_timeout = engine, shutdown_timeout
        self._stop_time = 0.0
        service: Service = app.state.service
        opened = cast(set[Connection], self.server_state.connections)
        self._limits, self._connections = service.limits, Connections(opened, service.limits, service.metrics)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections ourselves, within the bounds."""
        await super().startup(sockets=[])
        [sock] = sockets or []
        sock.setblocking(False)
        sock.listen(self.config.backlog)
        self._accepting = asyncio.create_task(accept(sock, self._connections, self._protocol))

    def _protocol(self, address: str) -> Connection:
        state: dict[str, Any] = {"server_state": self.server_state, "app_state": self.lifespan.state}
        return Connection(address, self._limits, config=self.config, **state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])  # before the socket is closed
        await super().shutdown(sockets)
        if not self.force_exit:
            await self._engine.close()
        elif answers := set(self.server_state.tasks):  # cancelled, they would be logged as broken
            await asyncio.wait(answers, timeout=_LAST_WORDS)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop. Called ten times a second."""
        if counter % 10 == 0:
            self._connections.check_deadlines()
        if self._accepting.done():
            self._accepting.result()  # raises what has ended it
        return await super().on_tick(counter) or self._engine.failure is not None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGHUP, too: a terminal that closes, or a service manager. Where it is ignored, it stays so."""
        with super().capture_signals():
            before = signal.getsignal(signal.SIGHUP)
            taken = before is not signal.SIG_IGN and threading.current_thread() is threading.main_thread()
            if taken:
                signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                if taken:
                    signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called as a signal handler, between any two instructions."""
        now = monotonic()
        if self.should_exit and now - self._stop_time < TWICE:
            return
        self.force_exit, self._stop_time = self.should_exit, now  # a second signal: at once
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._wind_down)

    def _wind_down(self) -> None:
        if self.force_exit:
            self._engine.stop()
            return
        logs.event("stopping", shutdown_timeout=self._shutdown_timeout)
        if sys.stderr.isatty():
            print(AGAIN, file=sys.stderr, flush=True)
        self._engine.drain()
        self._loop.call_later(self._shutdown_timeout, self._engine.stop)

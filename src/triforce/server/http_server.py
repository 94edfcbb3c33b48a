"""The HTTP server: accepts connections within bounds, and runs until a signal."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from ipaddress import IPv6Address, IPv6Network, ip_address
from time import monotonic
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from triforce.server import logs
from triforce.server.engine_client import EngineClient
from triforce.server.errors import RETRY_SECONDS, ApiError
from triforce.server.limits import Limits
from triforce.server.metrics import Metrics
from triforce.server.service import Service

_ABORT_SECONDS = 1.0
"""Seconds in which answers end after a second signal has cancelled them."""
PAUSE_SECONDS = 0.1
"""Seconds that accepting pauses where no connection can be freed."""
_RESOURCE_ERRNOS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Connection(H11Protocol):
    """HTTP on one connection. address: of the client, as `network` returns it."""

    def __init__(self, address: str, limits: Limits, **settings: Any) -> None:
        super().__init__(**settings)
        self.address = address
        self._limits = limits
        self.progress_time = self.loop.time()
        """Time of the last progress."""
        self._unsent_bytes = 0

    def on_response_complete(self) -> None:
        self.progress_time = self.loop.time()
        super().on_response_complete()

    @property
    def is_idle(self) -> bool:
        return self._answered and not self.transport.get_write_buffer_size()

    @property
    def _answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def missed_deadline(self) -> str | None:
        """Return the name of the missed deadline, or None. Called once a second.

        While an answer is produced, there is no deadline. If the answer is complete or paused, and bytes are still in
        the send buffer, the buffer must shrink: the client has to read.
        """
        loop_time = self.loop.time()
        unsent = self.transport.get_write_buffer_size()
        is_producing = not (self._answered or self.flow.write_paused or self.transport.is_closing())
        if is_producing or unsent < self._unsent_bytes:
            self.progress_time = loop_time
        self._unsent_bytes = unsent
        if unsent:
            return "answer_not_read" if loop_time - self.progress_time > self._limits.stall_seconds else None
        return "headers_late" if loop_time - self.progress_time > self._limits.header_seconds else None

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with an error in the common format, unless an answer is being sent, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_INVALID_HTTP)
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing. The request is answered, and uvicorn's advice is to install packages that are not used here."""

    def end(self) -> None:
        """Close the connection at once, with a 408 where a request has begun to arrive."""
        has_partial_request = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if self.is_idle and has_partial_request:
            self.transport.write(_HEADERS_LATE)
        self.transport.abort()


class Connections:
    """The open connections. open_connections: a live set, from which a connection removes itself when it closes."""

    def __init__(self, open_connections: Collection[Connection], limits: Limits, metrics: Metrics) -> None:
        self._open = open_connections
        self._limits = limits
        self._metrics = metrics
        self._event_counts: Counter[str] = Counter()
        metrics.connections.set_function(lambda: len(open_connections))

    def is_full(self, address: str | None = None) -> bool:
        """Return whether `address` is at its limit of connections; None: whether the server is."""
        limit = self._limits.connections if address is None else self._limits.connections_of_one_address
        return len(self._from_address(address)) >= limit

    def close_idle(self, address: str | None = None) -> bool:
        """Close the connection that has been idle longest. Returns whether there is one.

        The closed connection leaves the set at the next iteration of the event loop.
        """
        oldest = min((c for c in self._from_address(address) if c.is_idle), key=lambda c: c.progress_time, default=None)
        if oldest is not None:
            oldest.end()
            self.count_event("gave_way")
        return oldest is not None

    def check_deadlines(self) -> None:
        """Close connections past a deadline, and log the counted events.

        It is called once a second, so there is at most one line of log a second.
        """
        for connection in list(self._open):
            if missed_deadline := connection.missed_deadline():
                connection.end()
                self.count_event(missed_deadline)
        if self._event_counts:
            logs.event("connections", open=len(self._open), **self._event_counts)
            self._event_counts.clear()

    def count_event(self, event: str) -> None:
        """Count an event, for the metrics and the log."""
        self._metrics.connection_event(event)
        self._event_counts[event] += 1

    def _from_address(self, address: str | None) -> list[Connection]:
        return [c for c in self._open if address is None or c.address == address]


def network(host: str) -> str:
    """Return the address by which connections are limited: an IPv4 address, or the /64 of an IPv6 address.

    A /64 is the smallest IPv6 network of a customer or machine, so one client may use all of its 2**64 addresses.
    IPv4 addresses on an IPv6 socket (::ffff:192.0.2.1) count as IPv4.
    """
    address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is None:
            return str(IPv6Network((address, 64), strict=False))
        address = address.ipv4_mapped
    return str(address)


async def accept(sock: socket.socket, connections: Connections, protocol: Callable[[str], Connection]) -> None:
    """Accept connections until cancelled. protocol: makes the protocol of a connection from its address.

    asyncio's own accept loop has no bounds, and logs thousands of lines a second where descriptors run out.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            client, (host, *_) = await loop.sock_accept(sock)
        except OSError as error:
            if error.errno in _RESOURCE_ERRNOS:
                connections.count_event("no_descriptors")
                await _free_connection(connections)
            else:  # an error of one client before it was accepted
                await asyncio.sleep(PAUSE_SECONDS)
            continue
        await _admit(client, network(host), connections, protocol)


async def _admit(
    client: socket.socket, address: str, connections: Connections, protocol: Callable[[str], Connection]
) -> None:
    with suppress(OSError):  # the client may have disconnected
        try:
            admitted = not connections.is_full(address) or connections.close_idle(address)
            await asyncio.sleep(0)  # a closed connection leaves the set, and other tasks run
            if not admitted:
                connections.count_event("refused")
                return _refuse(client)
            while connections.is_full():
                await _free_connection(connections)
            await asyncio.get_running_loop().connect_accepted_socket(partial(protocol, address), client)
        except BaseException:
            client.close()
            raise


async def _free_connection(connections: Connections) -> None:
    """Close an idle connection, or pause for a moment where none is idle."""
    if connections.close_idle():
        return await asyncio.sleep(0)
    connections.count_event("paused")
    await asyncio.sleep(PAUSE_SECONDS)


def _refuse(client: socket.socket) -> None:
    """Send a refusal before a request is parsed. Pending bytes are read: a close with unread bytes loses the answer."""
    with client:
        client.send(_TOO_MANY_CONNECTIONS)
        with suppress(BlockingIOError):
            client.recv(2**16)


def raw_response(refusal: ApiError) -> bytes:
    """Return the bytes of an error response, for use before a request is parsed. The connection closes after it."""
    response = refusal.response()
    lines = [b"HTTP/1.1 %d %s" % (refusal.status, HTTPStatus(refusal.status).phrase.encode()), b"connection: close"]
    lines += [b"%s: %s" % header for header in response.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(response.body)])


_INVALID_HTTP = raw_response(
    ApiError(
        400,
        "this is no valid request of HTTP/1.1; send plain HTTP, with one Host header and the right Content-Length, or "
        "put a TLS proxy in front of the server",
    )
)
_HEADERS_LATE = raw_response(ApiError(408, "the request's headers did not arrive in time; send it again"))
_TOO_MANY_CONNECTIONS = raw_response(
    ApiError(
        429,
        "your address has reached its limit of connections, and none is idle; close some, or start the server with a "
        "larger --max-connections-per-address",
        code="too_many_connections",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )
)


_SHUTDOWN_SLACK = 5
"""Seconds beyond the shutdown timeout in which cancelled answers reach their clients."""
INTERRUPT_HINT = "running requests are finished first; press Ctrl-C again to end at once"
SAME_SIGNAL_SECONDS = 0.5
"""Seconds within which two signals count as one: a service manager may signal a process and its parent, which forwards
it."""


def serve(app: FastAPI, engine: EngineClient, sock: socket.socket, shutdown_timeout: float) -> None:
    """Serve until SIGTERM, SIGHUP or SIGINT. Running requests then have `shutdown_timeout` seconds to end.

    Raises the error that ended the engine, if there is one.
    """
    asyncio.run(Server(app, engine, shutdown_timeout).serve([sock]))
    if engine.failure:
        raise engine.failure


class Server(uvicorn.Server):
    """Bounds connections, and stops the engine on a signal. The process then exits normally, not by the signal."""

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
            timeout_graceful_shutdown=int(shutdown_timeout) + _SHUTDOWN_SLACK,
        )
        super().__init__(config)
        self._engine = engine
        self._shutdown_timeout = shutdown_timeout
        self._stop_time = 0.0
        service: Service = app.state.service
        open_connections = cast(set[Connection], self.server_state.connections)
        self._limits = service.limits
        self._connections = Connections(open_connections, service.limits, service.metrics)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start without sockets, and accept connections in `accept`, within the bounds."""
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
        elif answers := set(self.server_state.tasks):  # if cancelled they would be logged as failures
            await asyncio.wait(answers, timeout=_ABORT_SECONDS)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop. Called ten times a second."""
        if counter % 10 == 0:
            self._connections.check_deadlines()
        if self._accepting.done():
            self._accepting.result()  # raises its error
        return await super().on_tick(counter) or self._engine.failure is not None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGHUP, too: from a closing terminal or a service manager. An ignored SIGHUP stays ignored."""
        with super().capture_signals():
            previous_handler = signal.getsignal(signal.SIGHUP)
            handles_sighup = (
                previous_handler is not signal.SIG_IGN and threading.current_thread() is threading.main_thread()
            )
            if handles_sighup:
                signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                if handles_sighup:
                    signal.signal(signal.SIGHUP, previous_handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called as a signal handler, between any two instructions."""
        signal_time = monotonic()
        if self.should_exit and signal_time - self._stop_time < SAME_SIGNAL_SECONDS:
            return
        # a second signal stops at once
        self.force_exit = self.should_exit
        self._stop_time = signal_time
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._drain_or_stop)

    def _drain_or_stop(self) -> None:
        if self.force_exit:
            self._engine.stop()
            return
        logs.event("stopping", shutdown_timeout=self._shutdown_timeout)
        if sys.stderr.isatty():
            print(INTERRUPT_HINT, file=sys.stderr, flush=True)
        self._engine.drain()
        self._loop.call_later(self._shutdown_timeout, self._engine.stop)

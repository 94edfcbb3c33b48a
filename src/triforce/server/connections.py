"""Deadlines of connections, and a bound on their number.

A connection *waits* while no request of it is being answered: it is new, or idle, or its headers come slowly, or the
rest of a body whose request was answered already. What waits has a deadline, and gives way where places are short: the
one that has waited longest goes first. So who holds places without asking keeps nobody from asking.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Collection
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from triforce.errors import RequestError
from triforce.server import logs
from triforce.server.errors import ApiError
from triforce.server.limits import CONNECTIONS, Limits
from triforce.server.metrics import Metrics


def places(wanted: int | None) -> int:
    """Connections that may be open: three quarters of the descriptors that this process may have hold them.

    The rest is for models, KV files and what the process talks through. Raises RequestError if more are wanted.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if descriptors == resource.RLIM_INFINITY else descriptors * 3 // 4
    if wanted is None:
        return min(CONNECTIONS, most)
    if wanted > most:
        raise RequestError(f"{wanted} connections need more file descriptors than this process may have, which is "
                           f"{descriptors}; raise that (ulimit -n), or give --max-connections {most}")  # fmt: skip
    return wanted


class Connection(H11Protocol):
    """HTTP on one connection, from an `address` as `door.network` has it."""

    def __init__(self, address: str, limits: Limits, **settings: Any) -> None:
        super().__init__(**settings)
        self.address, self._limits = address, limits
        self.since = self.loop.time()
        """Time of the last progress."""
        self._unsent = 0

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()

    @property
    def waits(self) -> bool:
        return self._idle and not self.transport.get_write_buffer_size()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def fault(self) -> str | None:
        """Return the name of the deadline that was missed, or None. Called once a second.

        While an answer is made nothing is expected of a client but that it reads. Whether it does is seen where nothing
        is added to what is not sent yet: that must become less.
        """
        now, unsent = self.loop.time(), self.transport.get_write_buffer_size()
        adding = not (self._idle or self.flow.write_paused or self.transport.is_closing())
        if adding or unsent < self._unsent:
            self.since = now
        self._unsent = unsent
        if unsent:
            return "answer_not_read" if now - self.since > self._limits.stall_seconds else None
        return "headers_late" if now - self.since > self._limits.header_seconds else None

    def end(self) -> None:
        """Close it at once, with an answer where a request has begun to come."""
        begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if self.waits and begun:
            self.transport.write(_LATE)
        self.transport.abort()


class Connections:
    """The open connections, a set that each leaves when it closes."""

    def __init__(self, opened: Collection[Connection], limits: Limits, metrics: Metrics) -> None:
        self._open, self._limits, self._metrics = opened, limits, metrics
        self._noted: Counter[str] = Counter()
        metrics.connections.set_function(lambda: len(opened))

    def full(self, address: str | None = None) -> bool:
        """Whether all places are taken, or all that one address may have."""
        most = self._limits.connections if address is None else self._limits.places_of_an_address
        return len(self._of(address)) >= most

    def make_room(self, address: str | None = None) -> bool:
        """Whether one of them waits; the one that has waited longest is closed, at the next turn of the event loop."""
        oldest = min((c for c in self._of(address) if c.waits), key=lambda c: c.since, default=None)
        if oldest is not None:
            oldest.end()
            self.note("gave_way")
        return oldest is not None

    def look(self) -> None:
        """Close what is late, and log what was noted: called once a second, so there is one line a second at most."""
        for connection in list(self._open):
            if fault := connection.fault():
                connection.end()
                self.note(fault)
        if self._noted:
            logs.event("connections", open=len(self._open), **self._noted)
            self._noted.clear()

    def note(self, event: str) -> None:
        """Count it, for the metrics and the log."""
        self._metrics.connection_event(event)
        self._noted[event] += 1

    def _of(self, address: str | None) -> list[Connection]:
        return [c for c in self._open if address is None or c.address == address]


def raw(refusal: ApiError) -> bytes:
    """A refusal as it is sent where there is no request to answer; the connection is closed behind it."""
    response = refusal.response()
    lines = [b"HTTP/1.1 %d %s" % (refusal.status, HTTPStatus(refusal.status).phrase.encode()), b"connection: close"]
    lines += [b"%s: %s" % header for header in response.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(response.body)])


_LATE = raw(ApiError(408, "the request's headers did not arrive in time; send it again"))

"""RankLink: the connection to one other rank. A message goes each way at the same time, so that neither side waits."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import NamedTuple, Self

_HEADER = Struct("<12s4Q")
LENGTH_OFFSET = _HEADER.size - 8
"""Offset of the content's length in a packed header."""


class MessageHeader(NamedTuple):
    """Start of a message: what its sender does, and how far it is. Counts include this message."""

    operation: bytes
    """Name of the group's operation, in ASCII."""
    broadcasts: int
    votes: int
    exchanges: int
    """Number of all other messages."""
    length: int
    """Bytes of the content, which follows."""

    def pack(self) -> bytes:
        return _HEADER.pack(*self)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Self:
        return cls(*_HEADER.unpack(data))

    def __str__(self) -> str:
        operation = self.operation.rstrip(b"\0").decode("ascii", "replace")
        return f"{operation} of {self.length} bytes"


class LinkError(Exception):
    """The other rank has ended, or does not answer. The text is the reason."""


class UnexpectedHeader(Exception):
    """The other rank has sent a message of another kind, size or number: the ranks have diverged."""

    def __init__(self, header: MessageHeader) -> None:
        super().__init__(str(header))
        self.header = header


class RankLink:
    """Connection to `rank`. Messages go on from where they are whenever `advance` is called."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self._connection = connection
        self._unsent: list[memoryview] = []
        self._unreceived: list[memoryview] = []
        self._header = bytearray(_HEADER.size)
        self._expected_header = b""
        """Start of the header that the incoming message must have; empty once it is checked."""
        self._send_error: OSError | None = None
        connection.setblocking(False)

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def events(self) -> int:
        """Events of `select.poll` for which the messages wait."""
        return select.POLLOUT * bool(self._unsent) | select.POLLIN * bool(self._unreceived)

    def send(self, *parts: bytes | memoryview) -> None:
        """Begin to send a message of these parts."""
        self._unsent = [memoryview(part) for part in parts if len(part)]

    def expect(self, header: bytes, content: memoryview | None = None) -> None:
        """Begin to receive a message into `content`, whose header must begin with `header`."""
        self._expected_header = header
        self._unreceived = [memoryview(self._header)]
        if content:
            self._unreceived.append(content)

    def expect_content(self, content: memoryview) -> None:
        """Begin to receive the content of a message whose header was received."""
        self._unreceived = [content] if content else []

    @property
    def received_header(self) -> MessageHeader:
        return MessageHeader.unpack(self._header)

    def advance(self) -> bool:
        """Send and receive what is possible without waiting; return whether both messages are complete.

        Raises LinkError and UnexpectedHeader.
        """
        if self._unsent:
            self._send_some()
        if self._unreceived:
            self._receive_some()
        if self._unsent or self._unreceived:
            return False
        if self._send_error:
            raise LinkError(f"rank {self.rank}: {self._send_error.strerror}")
        return True

    def close(self) -> None:
        self._connection.close()

    def _send_some(self) -> None:
        try:
            sent = self._connection.sendmsg(self._unsent)
        except BlockingIOError:
            return
        except OSError as error:
            # The other rank may have told why it ended: what it sent is read first.
            self._send_error = error
            sent = sum(map(len, self._unsent))
        self._unsent = _rest(self._unsent, sent)

    def _receive_some(self) -> None:
        try:
            received = self._connection.recvmsg_into(self._unreceived)[0]
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkError(f"rank {self.rank}: {error.strerror}") from error
        if not received:
            raise LinkError(f"rank {self.rank} has closed its connection")
        self._unreceived = _rest(self._unreceived, received)
        if self._expected_header and not (self._unreceived and self._unreceived[0].obj is self._header):
            if not self._header.startswith(self._expected_header):
                raise UnexpectedHeader(self.received_header)
            self._expected_header = b""


def wait_for(links: Iterable[RankLink], seconds: float | None) -> list[RankLink]:
    """Wait until some links can go on, and return them. Returns [] after `seconds`; None: there is no limit."""
    poll = select.poll()
    links_by_descriptor = {link.fileno(): link for link in links}
    for descriptor, link in links_by_descriptor.items():
        poll.register(descriptor, link.events)
    ready = poll.poll(None if seconds is None else seconds * 1000)
    return [links_by_descriptor[descriptor] for descriptor, _ in ready]


def _rest(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return the parts without their first `count` bytes."""
    rest = []
    for part in parts:
        if count < len(part):
            rest.append(part[count:])
        count = max(count - len(part), 0)
    return rest

"""Meeting of ranks: each process gets a connection to every other one, by sockets that no other program can join.

A meeting is a URL. `file://FOLDER/NAME` is for ranks of one machine: they connect by Unix sockets in a folder that only
their user can enter. `tcp://HOST:PORT` is for any machines: rank 0 listens there, and the ranks prove to each other
that they know one key (see `rank_key` and `handshake`). They stop listening once they are connected.

A rank joins all ranks of smaller numbers, rank 0 first, which then tells where the others listen.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from triforce.distributed.handshake import JoinRequest, accept, join, receive, send
from triforce.distributed.rank_key import rank_key
from triforce.errors import RankError

JOIN_SECONDS = 5.0
"""Seconds in which a process that has connected must prove that it is a rank. Others wait meanwhile."""
RETRY_SECONDS = 0.05
"""Seconds between two attempts to join a rank that does not listen yet."""
MAX_SOCKET_PATH_BYTES = 100
"""Length that the path of a Unix socket may have on every system."""
KEEPALIVE_OPTIONS = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""Options by which the loss of a machine is noticed in 40 seconds. The end of a process is noticed at once."""

Endpoint = tuple[str, int]
"""Host and port where a rank listens. With Unix sockets there is no host, and the port is part of a file's name."""
FIRST: Endpoint = ("", 0)
"""Endpoint of rank 0, which is that of the meeting."""


class Meeting(Protocol):
    """Sockets of one kind."""

    key: bytes
    """Secret of the ranks; empty where file permissions keep others away."""

    def listen(self, rank: int) -> tuple[socket.socket, int]:
        """Return the socket where a rank accepts others, and its port. Raises OSError."""

    def connect(self, endpoint: Endpoint) -> socket.socket:
        """Return a connection to a rank. Raises OSError where it does not listen yet."""

    def endpoint(self, connection: socket.socket, port: int) -> Endpoint:
        """Return the endpoint of a rank that has joined rank 0 by `connection` and listens at `port`."""

    def close(self) -> None:
        """Remove what `listen` has left."""


def meet(rank: int, count: int, url: str) -> dict[int, socket.socket]:
    """Return connections to all other ranks, by rank; wait for each of them. Raises RankError."""
    if count == 1:
        return {}
    meeting = _meeting(url)
    try:
        listener, port = meeting.listen(rank)
    except OSError as error:
        reason = error.strerror or error
        raise RankError(
            f"rank {rank} cannot listen at {url} ({reason}); end what listens there, or meet elsewhere"
        ) from error
    connections: dict[int, socket.socket] = {}
    try:
        _connect_all(meeting, listener, JoinRequest(rank, count, port), connections)
        for connection in connections.values():
            _set_options(connection)
    except BaseException as error:
        for connection in connections.values():
            connection.close()
        if isinstance(error, OSError):
            raise RankError("another rank has ended before all met. Start again; --tp 1 needs no other rank") from error
        raise
    finally:
        listener.close()
        meeting.close()
    return connections


def _connect_all(
    meeting: Meeting, listener: socket.socket, request: JoinRequest, connections: dict[int, socket.socket]
) -> None:
    """Fill `connections`. request: of this rank. Raises RankError, or OSError where a rank is lost meanwhile."""
    endpoints = [FIRST]
    for other in range(request.rank):
        connections[other] = _joined(meeting, other, endpoints[other], request)
        if other == 0:
            endpoints += map(tuple, json.loads(receive(connections[0])))
    told_ports: dict[int, int] = {}

    def refusal(other: JoinRequest) -> str:
        if other.count != request.count:
            return f"rank {other.rank} is one of {other.count} ranks, and rank {request.rank} one of {request.count}"
        if not request.rank < other.rank < request.count or other.rank in connections:
            return f"there are two processes of rank {other.rank}"
        return ""

    while len(connections) < request.count - 1:
        connection, _ = listener.accept()
        try:
            joined = accept(connection, meeting.key, refusal, JOIN_SECONDS)
        except OSError:  # no rank of this meeting, or a slow one, which tries again
            connection.close()
            continue
        connections[joined.rank] = connection
        told_ports[joined.rank] = joined.port
    if request.rank == 0:
        others = range(1, request.count)
        table = [meeting.endpoint(connections[other], told_ports[other]) for other in others]
        for connection in connections.values():
            send(connection, json.dumps(table).encode())


def _joined(meeting: Meeting, other: int, endpoint: Endpoint, request: JoinRequest) -> socket.socket:
    """Return a connection to another rank, once that rank accepts this one. Raises RankError."""
    while True:
        try:
            connection = meeting.connect(endpoint)
        except PermissionError as error:
            raise RankError(f"rank {request.rank} may not connect to rank {other} ({error.strerror})") from error
        except OSError:  # it does not listen yet
            time.sleep(RETRY_SECONDS)
            continue
        try:
            join(connection, meeting.key, request)
        except OSError:  # this rank was slow, and taken for a stranger
            connection.close()
            time.sleep(RETRY_SECONDS)
        except BaseException:
            connection.close()
            raise
        else:
            return connection


def _meeting(url: str) -> Meeting:
    """Return the meeting at a URL. Raises RankError."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "file":
            return UnixMeeting(Path(unquote(parts.path)))
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            return TcpMeeting(parts.hostname, parts.port)
    except ValueError:
        pass
    raise RankError(f"ranks cannot meet at {url}; give file://FOLDER/NAME or tcp://HOST:PORT")


class UnixMeeting:
    """Unix sockets in a folder that only this user can enter. path: socket of rank 0.

    Raises RankError for another folder.
    """

    key = b""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._own_path: Path | None = None
        try:
            status = os.stat(path.parent)
        except OSError as error:
            raise RankError(f"{path.parent}, where the ranks are to meet, cannot be used ({error.strerror})") from error
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise RankError(f"others can use {path.parent}, where the ranks are to meet; give a folder of mode 700")

    def listen(self, rank: int) -> tuple[socket.socket, int]:
        port = secrets.randbits(31) if rank else 0
        if rank == 0:
            self._remove_stale_socket()
        listener = socket.socket(socket.AF_UNIX)
        with self._address(port) as address:
            listener.bind(address)
        self._own_path = self._socket_path(port)
        listener.listen()
        return listener, port

    def connect(self, endpoint: Endpoint) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            with self._address(endpoint[1]) as address:
                connection.connect(address)
        except OSError:
            connection.close()
            raise
        return connection

    def endpoint(self, connection: socket.socket, port: int) -> Endpoint:
        return "", port

    def close(self) -> None:
        if self._own_path:
            self._own_path.unlink(missing_ok=True)

    def _remove_stale_socket(self) -> None:
        """Remove what a killed run has left. Raises OSError if a rank 0 listens."""
        try:
            self.connect(FIRST).close()
        except OSError:
            self._path.unlink(missing_ok=True)
        else:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))

    def _socket_path(self, port: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{port}") if port else self._path

    @contextmanager
    def _address(self, port: int) -> Iterator[str]:
        """Yield the path of a rank's socket, by a shorter name where it is too long for the system."""
        path = self._socket_path(port)
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES or sys.platform != "linux":
            yield str(path)
            return
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{folder}/{path.name}"
        finally:
            os.close(folder)


class TcpMeeting:
    """TCP sockets, for ranks that know the key of `rank_key`. Rank 0 listens at a host and a port.

    Where that host is this machine's loopback, other machines cannot connect. Raises RankError where there is no key.
    """

    def __init__(self, host: str, port: int) -> None:
        self.key = rank_key()
        self._endpoint = host, port
        self._local = host == "localhost" or _is_loopback(host)

    def listen(self, rank: int) -> tuple[socket.socket, int]:
        host, port = self._endpoint
        port = 0 if rank else port
        if self._local:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, port), family=family)
        elif socket.has_dualstack_ipv6():
            listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            listener = socket.create_server(("", port))
        return listener, listener.getsockname()[1]

    def connect(self, endpoint: Endpoint) -> socket.socket:
        connection = socket.create_connection(self._endpoint if endpoint == FIRST else endpoint)
        if connection.getsockname() == connection.getpeername():
            # For this end the system chose the very port on which no rank listens yet. It is to be free at once.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            raise ConnectionRefusedError("a connection with itself")
        return connection

    def endpoint(self, connection: socket.socket, port: int) -> Endpoint:
        host = connection.getpeername()[0].removeprefix("::ffff:")
        # A rank of rank 0's machine may connect by loopback, which is another machine for the others.
        return self._endpoint[0] if _is_loopback(host) else host, port

    def close(self) -> None:
        pass


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _set_options(connection: socket.socket) -> None:
    """Make a TCP connection send small messages at once, and notice the loss of the other machine."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE_OPTIONS.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

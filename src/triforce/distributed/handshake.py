"""Handshake of two ranks: each proves to the other that it knows the key, and none tells it.

Messages, each preceded by its length:

1. The joining rank sends a nonce.
2. The accepting rank sends a nonce.
3. The joining rank sends its `JoinRequest`, and a proof over both nonces and the request.
4. The accepting rank sends its answer, and a proof over both nonces and the answer. An empty answer accepts.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

from triforce.errors import RankError

MAX_MESSAGE_BYTES = 1 << 16
NONCE_BYTES = 32
PROOF_BYTES = 32
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class JoinRequest:
    """Facts that a rank tells of itself. port: where it listens (see `Endpoint`)."""

    rank: int
    count: int
    port: int


def join(connection: socket.socket, key: bytes, request: JoinRequest) -> None:
    """Join the rank at the other end, without a time limit: it may be busy with others.

    Raises RankError where it refuses or has another key, and OSError where the connection ends.
    """
    own_nonce = secrets.token_bytes(NONCE_BYTES)
    send(connection, own_nonce)
    nonces = own_nonce + receive(connection)
    told = json.dumps(astuple(request)).encode()
    send(connection, _proof(key, b"join", nonces, told) + told)
    reply = receive(connection)
    answer = reply[PROOF_BYTES:]
    if not hmac.compare_digest(reply[:PROOF_BYTES], _proof(key, b"accept", nonces, answer)):
        raise RankError("another process listens where the ranks meet, or the key of the ranks is another one there")
    if answer:
        raise RankError(answer.decode())


def accept(connection: socket.socket, key: bytes, refusal: Callable[[JoinRequest], str], seconds: float) -> JoinRequest:
    """Accept the rank at the other end. refusal: why a request cannot be met; an empty text if it can.

    Raises OSError unless that is a rank with the same key, which proves so within `seconds` and is not refused.
    """
    deadline = time.monotonic() + seconds
    their_nonce = receive(connection, deadline)
    own_nonce = secrets.token_bytes(NONCE_BYTES)
    send(connection, own_nonce)
    nonces = their_nonce + own_nonce
    message = receive(connection, deadline)
    told = message[PROOF_BYTES:]
    if not hmac.compare_digest(message[:PROOF_BYTES], _proof(key, b"join", nonces, told)):
        send(connection, bytes(PROOF_BYTES))
        raise PermissionError("a process without the key of the ranks")
    request = JoinRequest(*json.loads(told))
    answer = refusal(request)
    send(connection, _proof(key, b"accept", nonces, answer.encode()) + answer.encode())
    if answer:
        raise PermissionError(answer)
    connection.settimeout(None)
    return request


def send(connection: socket.socket, message: bytes) -> None:
    """Send a message with its length. Raises OSError."""
    connection.sendall(_LENGTH.pack(len(message)) + message)


def receive(connection: socket.socket, deadline: float | None = None) -> bytes:
    """Return a message. deadline: time of the monotonic clock. Raises OSError: late, too long, or no whole message."""
    (length,) = _LENGTH.unpack(_received(connection, _LENGTH.size, deadline))
    if length > MAX_MESSAGE_BYTES:
        raise ConnectionError("the message is too long")
    return _received(connection, length, deadline)


def _received(connection: socket.socket, length: int, deadline: float | None) -> bytes:
    data = b""
    while len(data) < length:
        connection.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
        piece = connection.recv(length - len(data))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return data


def _proof(key: bytes, role: bytes, nonces: bytes, message: bytes) -> bytes:
    return hmac.digest(key, role + nonces + message, "sha256")

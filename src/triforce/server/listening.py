"""The socket that a server listens on. Imports nothing heavy: a wrong address is told at once."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

from triforce.errors import RequestError

MOST_PORT = (1 << 16) - 1


def resolve(host: str, port: int) -> tuple[int, Any]:
    """Return the address family and the address that a host has. Raises RequestError."""
    if not 0 <= port <= MOST_PORT:
        raise RequestError(f"--port {port}: give a number from 1 to {MOST_PORT}, or 0 for any free one")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"--host {host}: no address is known by this name ({why}); give an address or a name of "
                           "this machine, such as 127.0.0.1 or 0.0.0.0") from error  # fmt: skip
    return family, address[:2]


def listen(host: str, port: int) -> socket.socket:
    """A socket of this address; port 0 is any free one. Raises RequestError."""
    family, address = resolve(host, port)
    try:
        return socket.create_server(address, family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RequestError(f"{host}:{port} is taken by another program, perhaps another triforce serve; end that, "
                               "or choose another --port, such as 0 for any free one") from error  # fmt: skip
        why = os.strerror(error.errno) if error.errno else str(error)
        raise RequestError(f"{host}:{port} cannot be listened on ({why}); choose another --port or --host") from error


def url(sock: socket.socket) -> str:
    """Return the URL of a socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

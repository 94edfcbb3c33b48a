"""Access settings of a server: keys, hosts and origins, validated before it starts. Imports only light modules."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from typing import Any

from triforce.errors import RequestError
from triforce.user_files import NotTextError, decode, read_file

KEYS_VARIABLE = "TRIFORCE_API_KEYS"
KEY_FILE_ADVICE = "give a text file with one key per line"
_SHORTEST_KEY = 16
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\.?")
_ORIGIN = re.compile(
    rf"([a-z][a-z0-9+.-]*)://({_HOST.pattern}|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{{1,5}}))?", re.IGNORECASE | re.ASCII
)
DEFAULT_PORTS = {"http": 80, "https": 443}
"""Default ports by scheme, which browsers omit from an origin."""


def read_keys(file: str | None) -> list[str]:
    """Return the API keys of a file, one per line, and of the environment, comma-separated. Raises RequestError.

    Lines that begin with # are comments.
    """
    try:
        lines = decode(read_file(file, KEY_FILE_ADVICE)).splitlines() if file else []
    except NotTextError as error:
        raise RequestError(f"{file} {error}") from error
    placed_keys = [(f"line {n} of {file}", line.strip()) for n, line in enumerate(lines, 1) if line.strip()[:1] != "#"]
    if file and not any(key for _, key in placed_keys):
        raise RequestError(f"the key file {file} has no key in it; write one key per line")
    listed = os.environ.get(KEYS_VARIABLE, "").split(",")
    placed_keys += [(f"key {n} of {KEYS_VARIABLE}", key.strip()) for n, key in enumerate(listed, 1)]
    for place, key in placed_keys:
        if key and (len(key) < _SHORTEST_KEY or not key.isascii()):
            raise RequestError(f"{place} is no key, as it is shorter than {_SHORTEST_KEY} characters or not ASCII; "
                               "make one with: python -c 'import secrets; print(secrets.token_urlsafe())'")  # fmt: skip
    return [key for _, key in placed_keys if key]


def require_key_beyond_loopback(host: str, keys: Sequence[str]) -> None:
    """Raise RequestError if other machines can reach the server and it has no key."""
    loopback = host == "localhost" or (is_address(host) and ip_address(host).is_loopback)
    if not keys and not loopback:
        raise RequestError(
            f"{host} is open to other machines, so a key is needed: set {KEYS_VARIABLE} or give --api-key-file, "
            "or leave out --host to serve this machine only"
        )


def require_hosts(names: Iterable[str]) -> None:
    """Raise RequestError unless each name is valid in a Host header."""
    for name in names:
        if not _HOST.fullmatch(name) and not is_address(name):
            raise RequestError(
                f"{name!r} is no name of a host; give --allowed-host once for each name, without scheme, port and *, "
                "such as gpu.example.org"
            )


def as_browsers_send(origin: str) -> str | None:
    """Return an origin as browsers write it: in lower case, without the default port; None for an invalid origin."""
    parts = _ORIGIN.fullmatch(origin)
    if parts is None or int(parts["port"] or 0) > MAX_PORT:
        return None
    scheme = parts[1].lower()
    portless = f"{scheme}://{parts[2].lower()}"
    port = int(parts["port"]) if parts["port"] else None
    return portless if port in (None, DEFAULT_PORTS.get(scheme)) else f"{portless}:{port}"


def checked_origins(origins: Iterable[str]) -> list[str]:
    """Return origins as browsers write them, or `*` for all. Raises RequestError for an invalid origin."""
    normal_origins = list[str]()
    for origin in origins:
        normal_origin = "*" if origin == "*" else as_browsers_send(origin)
        if normal_origin is None:
            raise RequestError(
                f"{origin!r} is no origin of pages; give --cors-origin once for each origin: a scheme and "
                "a host without *, such as https://example.org. The value * alone allows all origins"
            )
        normal_origins.append(normal_origin)
    return normal_origins


def is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


MAX_PORT = (1 << 16) - 1


def resolve(host: str, port: int) -> tuple[int, Any]:
    """Return the address family and the socket address of a host. Raises RequestError."""
    if not 0 <= port <= MAX_PORT:
        raise RequestError(f"--port {port}: give a number from 1 to {MAX_PORT}, or 0 for any free one")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"--host {host}: no address is known by this name ({why}); give an address or a name of "
                           "this machine, such as 127.0.0.1 or 0.0.0.0") from error  # fmt: skip
    return family, address[:2]


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket of this address; port 0 is any free port. Raises RequestError."""
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

"""Settings of access to a server: keys, hosts and origins, checked before it starts. Imports nothing heavy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from ipaddress import ip_address

from triforce.errors import RequestError
from triforce.text_encoding import NotTextError, decode
from triforce.user_files import read_file

KEYS_VARIABLE = "TRIFORCE_API_KEYS"
KEY_FILE = "give a text file with one key a line"
_SHORTEST_KEY = 16
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


def read_keys(file: str | None) -> list[str]:
    """Return keys from a file, one a line, and from the environment, with commas between. Raises RequestError."""
    try:
        lines = decode(read_file(file, KEY_FILE)).splitlines() if file else []
    except NotTextError as error:
        raise RequestError(f"{file} {error}") from error
    keys = [key.strip() for key in [*lines, *os.environ.get(KEYS_VARIABLE, "").split(",")] if key.strip()]
    if file and not keys:
        raise RequestError(f"the key file {file} has no key in it; write one a line")
    if any(len(key) < _SHORTEST_KEY or not key.isascii() for key in keys):
        raise RequestError(f"a key is shorter than {_SHORTEST_KEY} characters or not ASCII; "
                           "make one with: python -c 'import secrets; print(secrets.token_urlsafe())'")  # fmt: skip
    return keys


def require_key_beyond_loopback(host: str, keys: Sequence[str]) -> None:
    """Raise RequestError if other machines could use the server without a key."""
    loopback = host == "localhost" or (is_address(host) and ip_address(host).is_loopback)
    if not keys and not loopback:
        raise RequestError(
            f"{host} is open to other machines, so a key is needed: set {KEYS_VARIABLE} or give --api-key-file, "
            "or leave out --host to serve this machine only"
        )


def require_origins(origins: Iterable[str]) -> None:
    """Raise RequestError unless each is the origin of pages, or `*` for all."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise RequestError(
                f"{origin!r} is no origin; give --cors-origin a scheme and a host, such as https://example.org, or *"
            )


def is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True

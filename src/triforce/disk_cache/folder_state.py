"""Numbers that the processes which use a folder share, and the lock that they are changed under."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from dataclasses import dataclass
from zlib import crc32

LOCK_SECONDS = 5.0
"""How long a lock that another process holds is waited for."""
POLL_SECONDS = 0.01
"""Between two attempts to take a lock."""
MOST_ORDER = 1 << 33
"""A place in the order of use beyond this is none: in nanoseconds it would not fit where files have their times."""
_NUMBERS = struct.Struct("<QQ")
_MOST_NUMBER = (1 << 64) - 1
_CHECKSUM = 4


@dataclass(slots=True)
class FolderState:
    """Numbers that processes share, under the folder's lock. They are hints: a scan of the folder puts them right."""

    order: int = 0
    """The latest place in the order of use; 0: nothing is known. No clock is asked."""
    bytes: int = 0
    """Bytes of all entries, or more."""


def read_state(descriptor: int) -> FolderState:
    """Return the numbers in a file; those of nothing where they are damaged. Raises OSError."""
    held = unsealed(os.pread(descriptor, _NUMBERS.size + _CHECKSUM, 0))
    state = FolderState(*_NUMBERS.unpack(held)) if len(held) == _NUMBERS.size else FolderState()
    return state if state.order <= MOST_ORDER else FolderState()


def write_state(descriptor: int, state: FolderState) -> None:
    """Write the numbers to a file. Raises OSError."""
    os.pwrite(descriptor, sealed(_NUMBERS.pack(state.order, min(state.bytes, _MOST_NUMBER))), 0)


def take_lock(descriptor: int, seconds: float) -> bool:
    """Lock a file against all other processes. Returns whether that was possible within so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(POLL_SECONDS)


def give_lock(descriptor: int) -> None:
    """Unlock a file."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def sealed(data: bytes) -> bytes:
    """Return data with its checksum behind it."""
    return data + crc32(data).to_bytes(_CHECKSUM, "little")


def unsealed(held: bytes) -> bytes:
    """Return the data that was sealed; nothing where it is not as it was."""
    data = held[:-_CHECKSUM]
    return data if held == sealed(data) else b""

"""Backing stores of offloaded KV pages: a file, or other memory."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from triforce.backends.kernel_api import SECTOR, OffloadLayout, PageStore
from triforce.distributed.group import ALONE, TPGroup
from triforce.errors import CacheError, argument
from triforce.kvcache.host_memory import free_memory
from triforce.kvcache.offload_sizing import KVSizing, OffloadConfig, format_bytes, memory_for, round_up


def plan_offload(offload: OffloadConfig, sizing: KVSizing, ranks: TPGroup = ALONE) -> OffloadLayout | None:
    """Create the backing store of a rank's pages, and plan how much of them stays in memory.

    Returns None where all pages fit and the user set no limit. Raises CacheError.
    """
    memory = memory_for(offload, sizing, ranks)
    if memory is None:
        return None
    frames, buffers, layers = sizing.split(offload, memory // ranks.count)
    if offload.kind == "file":
        store: PageStore = FileStore(sizing)
    else:
        size = sizing.store_bytes(layers)
        if sizing.reader and ranks.count * size > ranks.broadcast(free_memory()):
            raise _too_large(
                ranks.count * size,
                f"a larger {argument('kv_memory')}, a smaller {argument('context')}, or fewer texts at a time",
            )
        store = HostStore(size, sizing.reader)
    return OffloadLayout(store, sizing.page_bytes, frames, buffers, sizing.buffer_frames, layers, sizing.written_frames)


class FileStore:
    """An unlinked file: no other process can open it, and it is gone with its last descriptor.

    That holds however the process ends.
    """

    memory = None

    def __init__(self, sizing: KVSizing) -> None:
        self.bytes = sizing.offloadable_bytes
        try:
            self.file, path = tempfile.mkstemp(prefix="triforce-kv-")  # 0600, in TMPDIR
        except OSError as error:
            raise CacheError(
                f"the file for KV cannot be made ({error}); set TMPDIR to a folder you may write"
            ) from error
        try:
            aligned = sizing.page_bytes % SECTOR == 0 or SECTOR % sizing.page_bytes == 0
            self.direct = _open_direct(path) if aligned else -1
        finally:
            os.unlink(path)
        self._close = finalize(self, _close, [self.file, self.direct])
        os.ftruncate(self.file, round_up(self.bytes, SECTOR))

    @property
    def usage(self) -> tuple[int, int]:
        """Bytes of memory and of files."""
        return 0, os.fstat(self.file).st_blocks * 512


class HostStore:
    """Host memory. On a CPU it has no use but to show what host memory beside a GPU would do.

    Beside a GPU it is pinned: copies run at the rate of the bus while kernels compute, and kernels may read it.
    """

    file = direct = -1

    def __init__(self, size: int, reader: str | None = None) -> None:
        self.bytes = size
        try:
            self.memory: NDArray[np.uint8] = np.empty(size, np.uint8)
        except MemoryError as error:
            raise _too_large(size, argument("kv_offload", "file")) from error
        if reader and size:
            self._pin(reader)

    @property
    def usage(self) -> tuple[int, int]:
        return self.memory.nbytes, 0

    def _pin(self, reader: str) -> None:
        """Pin the memory for a CUDA device. Raises CacheError."""
        from triforce.backends.torch import devices

        if code := devices.pin(self.memory, reader):
            raise CacheError(
                f"{format_bytes(self.bytes)} of memory cannot be pinned for the KV cache (CUDA error {code}); use a "
                f"smaller {argument('context')}, or fewer texts at a time"
            )
        unpin = finalize(self, devices.unpin, self.memory.ctypes.data, reader)
        unpin.atexit = False  # the end of a process unpins by itself


def _too_large(size: int, advice: str) -> CacheError:
    return CacheError(f"the KV cache needs {format_bytes(size)} of memory, more than there is; use {advice}")


def _open_direct(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except (OSError, AttributeError):  # the file system, or the system, has no direct reads
        return -1


def _close(files: list[int]) -> None:
    for file in files:
        if file >= 0:
            with suppress(OSError):
                os.close(file)

"""Stores of KV pages that memory has no room for: a file, or other memory."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from weakref import finalize

import torch
from torch import Tensor

from triforce.backends.current_device import device_context
from triforce.backends.kernel_api import SECTOR, OffloadLayout, PageStore
from triforce.distributed.group import ALONE, TPGroup
from triforce.errors import CacheError, argument
from triforce.kvcache.offload_sizing import KVSizing, OffloadConfig, describe, free_memory, memory_for, round_up


def room(offload: OffloadConfig, needs: KVSizing, ranks: TPGroup = ALONE) -> OffloadLayout | None:
    """A place for a rank's pages, and what stays; None where all fit and nobody said otherwise. Raises CacheError."""
    memory = memory_for(offload, needs, ranks)
    if memory is None:
        return None
    frames, buffers, layers = needs.split(offload, memory // ranks.count)
    if offload.kind == "file":
        store: PageStore = FileStore(needs)
    else:
        size = needs.stored(layers)
        if needs.reader and ranks.count * size > ranks.broadcast(free_memory()):
            raise _too_much(
                ranks.count * size,
                f"a larger {argument('kv_memory')}, a smaller {argument('context')}, or fewer texts at a time",
            )
        store = HostStore(size, needs.reader)
    return OffloadLayout(store, needs.page_bytes, frames, buffers, needs.buffer_frames, layers, needs.moving)


class FileStore:
    """A file that nobody else can open, and that is gone with its last descriptor, however the process ends."""

    memory = None

    def __init__(self, needs: KVSizing) -> None:
        self.bytes = needs.bytes
        try:
            self.file, path = tempfile.mkstemp(prefix="triforce-kv-")  # 0600, in TMPDIR
        except OSError as error:
            raise CacheError(
                f"the file for KV cannot be made ({error}); set TMPDIR to a folder you may write"
            ) from error
        try:
            aligned = needs.page_bytes % SECTOR == 0 or SECTOR % needs.page_bytes == 0
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
    """Memory. On a CPU it has no use of its own: it shows what memory beside a GPU's would do.

    Beside a GPU it is pinned: copies run at the rate of the bus, beside what is computed, and kernels may read it.
    """

    file = direct = -1

    def __init__(self, size: int, reader: torch.device | None = None) -> None:
        self.bytes = size
        try:
            self.memory = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise _too_much(size, argument("kv_offload", "file")) from error
        if reader and size:
            unpin = finalize(self, _unpin, _pin(self.memory, reader), reader)
            unpin.atexit = False  # the end of a process unpins by itself

    @property
    def usage(self) -> tuple[int, int]:
        return self.memory.numel(), 0


def _too_much(size: int, instead: str) -> CacheError:
    return CacheError(f"the KV cache needs {describe(size)} of memory, more than there is; use {instead}")


def _pin(memory: Tensor, reader: torch.device) -> int:
    """Pin memory and return where it begins: torch's own allocation rounds up to a power of two. Raises CacheError."""
    address = memory.data_ptr()
    with device_context(reader):  # or device 0 would be set up for it
        code = int(torch.cuda.cudart().cudaHostRegister(address, memory.numel(), 0))
    if code:
        raise CacheError(
            f"{describe(memory.numel())} of memory cannot be pinned for the KV cache (CUDA error {code}); use a "
            f"smaller {argument('context')}, or fewer texts at a time"
        )
    return address


def _unpin(address: int, reader: torch.device) -> None:
    torch.cuda.synchronize(reader)  # copies from and to it may be under way
    with device_context(reader):
        torch.cuda.cudart().cudaHostUnregister(address)


def _open_direct(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except (OSError, AttributeError):  # a file system, or a system, without such reads
        return -1


def _close(files: list[int]) -> None:
    for file in files:
        if file >= 0:
            with suppress(OSError):
                os.close(file)

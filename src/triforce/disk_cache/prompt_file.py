"""Prompt files: the KV cache of a prompt in a file, so that a second question on the same document starts at once.

A file has the format of a disk cache's entry (see `disk_cache.entry`), with the kind `prompt`, at a path of the user's
choice. Its tensors are `ids` (N), then `keys.L` and `values.L` of each layer (G, N, D), with scales for int8 KV (see
`kv_rows`), then `EAGLE_TENSORS` of an EAGLE head, the last of them (N, C). Layers with a window may have the latest
tokens only. The file is written layer by layer, so that a cache larger than half the memory can be saved.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from triforce.arrays import HOST_TYPES, Array, to_host
from triforce.backends.dispatch import VARIABLE
from triforce.backends.kernel_api import PAGE, pages_for
from triforce.disk_cache.entry import (
    DIGEST_BYTES,
    FORMAT,
    LENGTH_BYTES,
    DamagedEntry,
    file_head,
    header,
    header_length,
    sealed,
)
from triforce.errors import CacheError, argument
from triforce.kvcache.eagle_memory import EAGLE_TENSORS, EagleHeadSlots
from triforce.kvcache.pool import PagePool
from triforce.kvcache.views.full import TAIL, FullView
from triforce.model.kv_rows import STORED_TYPES
from triforce.ragged import common_prefix
from triforce.whole_file import whole_file

KIND = "prompt"
ID_BYTES = 8
"""Bytes of a token id in a file."""
_BLOCK = 1 << 22
_TYPES = {"I64": np.dtype(np.int64)} | {STORED_TYPES[name]: dtype for name, dtype in HOST_TYPES.items()}
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class CacheFingerprint(NamedTuple):
    """Identity of the model and kernels that computed a cache.

    Other models and kernels compute other bits, which may change the text.
    """

    model: str
    """The fingerprint of the checkpoint."""
    kernels: str
    """`dispatch.identity` of the model and of its KV memory, and the build of the kernels."""


def reserve(path: Path, size: int) -> IO[bytes]:
    """Reserve `size` bytes of disk space beside `path` until the returned file is closed. Raises CacheError.

    It is called before a long prefill, so that saving its KV does not fail for lack of space.
    """
    try:
        path = path.resolve()
    except FileNotFoundError as error:
        raise CacheError(
            f"cannot write the KV cache to {path}: the current folder was deleted; go to another"
        ) from error
    if not path.parent.is_dir():
        raise CacheError(f"cannot write the KV cache to {path}: there is no folder {path.parent}; make it, or name a "
                         "file in another")  # fmt: skip
    if path.exists() and not path.is_file():
        raise CacheError(f"cannot write the KV cache to {path}: it is no file; name one")
    try:
        with ExitStack() as failed:
            file = failed.enter_context(tempfile.TemporaryFile(dir=path.parent))
            if hasattr(os, "posix_fallocate"):  # not on every system
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
            failed.pop_all()
        return file
    except OSError as error:
        raise CacheError(
            f"cannot write the KV cache to {path} ({error.strerror or error}); name a file in a folder you may write, "
            f"on a disk with {math.ceil(size / 2**20):,} MiB to spare"
        ) from error


def size_of(pool: PagePool, tokens: int) -> int:
    """Return an upper bound of the bytes of K, V and ids of `tokens` tokens."""
    eagle_bytes = pool.eagle_memory.token_bytes if pool.eagle_memory else 0
    cached_tokens = sum(
        min(tokens, pool.windows.max_pages * PAGE) if in_window and pool.windows else tokens
        for in_window in pool.uses_window_pages
    )
    return pool.token_bytes // pool.config.layers * cached_tokens + tokens * (eagle_bytes + ID_BYTES)


def save(path: Path, fingerprint: CacheFingerprint, full: FullView, b: int, prompt: list[int]) -> None:
    """Save row b's KV of `prompt` to a file, whole or not at all. Raises CacheError."""
    ids = prompt[: int(full.lengths_B[b])]
    pool = full.pool
    head = _head(fingerprint, pool, full.rows[b], len(ids))
    try:
        with whole_file(path) as partial, open(os.open(partial, _NEW, 0o600), "wb") as file:
            _write(file, head, _arrays(full, b, ids))
    except OSError as error:
        raise CacheError(
            f"cannot write the KV cache to {path} ({error.strerror or error}); free some space or name another file"
        ) from error


class SavedCache:
    """A file that `save` wrote, with its checksum verified. Raises CacheError.

    fingerprint: identity of the present model and kernels; a file of others is refused.
    """

    def __init__(self, path: Path, fingerprint: CacheFingerprint) -> None:
        try:
            with path.open("rb") as file:
                length = file.read(LENGTH_BYTES)
                beginning = length + file.read(header_length(length) - LENGTH_BYTES)
            facts, self._places, _ = header(memoryview(beginning))
            if facts.get("kind") != KIND:
                raise CacheError(
                    f"{path} is no prompt that this triforce saved; make one with {argument('save_cache')}"
                )
            if facts.get("fingerprint") != fingerprint.model:
                raise CacheError(
                    f"{path} was saved with another model, dtype, type of KV, context setting or EAGLE head (without "
                    f"one: {argument('draft', None)}); load it with the same ones, or make a new one with "
                    f"{argument('save_cache')}"
                )
            if facts.get("kernels") != fingerprint.kernels:
                raise CacheError(
                    f"{path} was computed by other kernels ({facts.get('kernels', 'unnamed')}; here "
                    f"{fingerprint.kernels}), whose bits differ; load it with the same ones ({VARIABLE} names them) "
                    f"and the same chunk, or make a new one with {argument('save_cache')}"
                )
            if not _is_whole(path):
                raise CacheError(
                    f"{path} is damaged: its checksum does not hold; make it anew with {argument('save_cache')}"
                )
            self._bytes = np.memmap(path, np.uint8, "r")
            self.ids: list[int] = self._array("ids").tolist()
        except OSError as error:
            advice = f"name a file that {argument('save_cache')} has written"
            raise CacheError(f"cannot read the KV cache {path} ({error.strerror or error}); {advice}") from error
        except (DamagedEntry, KeyError) as error:
            raise CacheError(
                f"{path} is damaged or no saved KV cache ({error}); make it anew with {argument('save_cache')}"
            ) from error

    def restore(self, full: FullView, b: int, prompt: list[int]) -> int:
        """Restore the common prefix of `prompt` and the saved prompt into empty row b. Returns its length.

        The prompt's last `TAIL` tokens are left to be fed, as selections need their queries. Returns 0 where the file
        lacks a window before the prefix's end.
        """
        length = min(common_prefix(self.ids, prompt), len(prompt) - 1 - TAIL)
        if length <= 0:
            return 0
        row = full.rows[b]
        pool = full.pool
        read = self._array
        starts = [len(self.ids) - self._places[f"keys.{n}"].shape[1] for n in range(pool.config.layers)]
        needed = [max(0, length - window + 1) if pool.windows else 0 for window in pool.config.windows]
        if any(
            pages_for(start) * PAGE > needed_token for start, needed_token in zip(starts, needed, strict=True) if start
        ):
            return 0
        names = ((f"keys.{n}", f"values.{n}", length - start) for n, start in enumerate(starts))
        pool.write(row, length, ((read(k)[:, :stop], read(v)[:, :stop]) for k, v, stop in names), max(starts))
        if pool.eagle_memory:
            keys, values, states = (read(name) for name in EAGLE_TENSORS)
            eagle_slots = EagleHeadSlots(keys[:, :length], values[:, :length], states[:length])
            pool.eagle_memory.write(pool.slots(row, 0, length), eagle_slots)
        return length

    def _array(self, name: str) -> NDArray[Any]:
        """Return a tensor of the file as a view of its mapping."""
        place = self._places[name]
        return self._bytes[place.start : place.stop].view(_TYPES[place.kind]).reshape(place.shape)


def _arrays(full: FullView, b: int, ids: list[int]) -> Iterator[Array]:
    """Yield the arrays of a file in its order. K and V of each layer are read lazily."""
    yield np.array(ids, np.int64)
    pool = full.pool
    row = full.rows[b]
    for layer in range(pool.config.layers):
        yield from pool.span(layer, row, pool.first_cached_token(layer, row), len(ids))
    if pool.eagle_memory:
        yield from pool.eagle_memory.read(pool.slots(row, 0, len(ids)))


def _write(file: BinaryIO, head: bytes, arrays: Iterator[Array]) -> None:
    data = (np.ascontiguousarray(to_host(array)).reshape(-1).view(np.uint8).data for array in arrays)
    for piece in sealed(head, data):
        file.write(piece)
    file.flush()
    os.fsync(file.fileno())


def _head(fingerprint: CacheFingerprint, pool: PagePool, row: int, tokens: int) -> bytes:
    config = pool.config
    facts = {"format": FORMAT, "kind": KIND, "fingerprint": fingerprint.model, "kernels": fingerprint.kernels}
    tokens_L = [tokens - pool.first_cached_token(layer, row) for layer in range(config.layers)]
    shapes_L = [(STORED_TYPES[pool.dtype], [config.kv_heads, tokens, config.row_size]) for tokens in tokens_L]
    layers = {f"{kind}.{layer}": shape for layer, shape in enumerate(shapes_L) for kind in ("keys", "values")}
    if eagle_memory := pool.eagle_memory:
        shapes = zip(EAGLE_TENSORS, eagle_memory.shapes(tokens), strict=True)
        layers |= {name: (STORED_TYPES[eagle_memory.dtype], list(sizes)) for name, sizes in shapes}
    return file_head(facts, {"ids": ("I64", [tokens]), **layers})


def _is_whole(path: Path) -> bool:
    """Whether the file ends in the checksum of all bytes before it.

    The offsets of the checksum that the header names are not trusted.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    unread_bytes = path.stat().st_size - DIGEST_BYTES
    with path.open("rb") as file:
        while unread_bytes > 0 and (block := file.read(min(_BLOCK, unread_bytes))):
            digest.update(block)
            unread_bytes -= len(block)
        return file.read() == digest.digest()

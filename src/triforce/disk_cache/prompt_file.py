"""The KV cache of a prompt in a file, so that a second question on the same document starts at once.

An entry of the disk cache's format (see `disk_cache.entry`), of the kind `prompt`, where its owner wants it: `ids` (N),
and `keys.L` and `values.L` of each layer (G, N, D), of int8 KV with scales (see `kv_rows`); of an EAGLE head
`EAGLE_TENSORS`, the last of them (N, C). Layers with a window may have the latest tokens alone. Written layer by layer, so
that a cache larger than half the memory can be saved.
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

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from triforce.backends.dispatch import VARIABLE
from triforce.backends.kernel_api import PAGE, pages_for
from triforce.backends.kv_rows import STORED_TYPES
from triforce.disk_cache.entry import DIGEST, FORMAT, beginning, sealed
from triforce.errors import CacheError, argument
from triforce.kvcache.eagle_memory import EAGLE_TENSORS, EagleHeadSlots
from triforce.kvcache.pool import PagePool
from triforce.kvcache.views.full import TAIL, FullView
from triforce.ragged import common_prefix
from triforce.whole_file import whole_file

KIND = "prompt"
_open: Any = safe_open  # safetensors leaves it untyped
_BLOCK = 1 << 22
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class CacheFingerprint(NamedTuple):
    """Identity of what computed a cache. Another gives other bits, and so perhaps another text than a fresh prefill."""

    model: str
    """The fingerprint of the checkpoint."""
    kernels: str
    """`dispatch.identity` of the model and of its KV memory, and the build of the kernels."""


def reserve(path: Path, size: int) -> IO[bytes]:
    """Hold room for `size` bytes at `path`, from before a long prefill until this is closed. Raises CacheError."""
    path = path.resolve()
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
    """Bytes of K, V and ids of so many tokens, at most."""
    features = pool.eagle_memory.token_bytes if pool.eagle_memory else 0
    kept = sum(
        min(tokens, pool.windows.max_pages * PAGE) if apart and pool.windows else tokens
        for apart in pool.uses_window_pages
    )
    return pool.token_bytes // pool.config.layers * kept + tokens * (features + torch.int64.itemsize)


def save(path: Path, maker: CacheFingerprint, full: FullView, b: int, prompt: list[int]) -> None:
    """Keep what row b of an exact view has seen of `prompt`. The file appears whole or not at all; else CacheError."""
    ids = prompt[: int(full.lengths_B[b])]
    pool = full.pool
    header = _header(maker, pool, full.rows[b], len(ids))
    try:
        with whole_file(path) as partial, open(os.open(partial, _NEW, 0o600), "wb") as file:
            _write(file, header, _tensors(full, b, ids))
    except OSError as error:
        raise CacheError(
            f"cannot write the KV cache to {path} ({error.strerror or error}); free some space or name another file"
        ) from error


class SavedCache:
    """A file that `save` wrote, checked. Raises CacheError."""

    def __init__(self, path: Path, maker: CacheFingerprint) -> None:
        try:
            path.open("rb").close()  # says in the system's words what safetensors says in others
            self._file = _open(path, framework="pt")
            about = self._file.metadata() or {}
            if (about.get("format"), about.get("kind")) != (FORMAT, KIND):
                raise CacheError(
                    f"{path} is no prompt that this triforce saved; make one with {argument('save_cache')}"
                )
            if about.get("fingerprint") != maker.model:
                raise CacheError(
                    f"{path} was saved with another model, dtype, type of KV, context setting or draft of hidden "
                    f"states (none: {argument('draft', None)}); load it with the same ones, or make a new one with "
                    f"{argument('save_cache')}"
                )
            if about.get("kernels") != maker.kernels:
                raise CacheError(
                    f"{path} was computed by other kernels ({about.get('kernels', 'unnamed')}; here {maker.kernels}), "
                    f"whose bits differ; load it with the same ones ({VARIABLE} names them) and the same chunk, or "
                    f"make a new one with {argument('save_cache')}"
                )
            if not _is_whole(path):
                raise CacheError(
                    f"{path} is damaged: its checksum does not hold; make it anew with {argument('save_cache')}"
                )
            self.ids: list[int] = self._file.get_tensor("ids").tolist()
        except OSError as error:
            made = f"name a file that {argument('save_cache')} has written"
            raise CacheError(f"cannot read the KV cache {path} ({error.strerror or error}); {made}") from error
        except SafetensorError as error:
            raise CacheError(
                f"{path} is damaged or no saved KV cache ({error}); make it anew with {argument('save_cache')}"
            ) from error

    def restore(self, full: FullView, b: int, prompt: list[int]) -> int:
        """Let the fresh row b of an exact view see what `prompt` shares with the saved one; returns how many tokens.

        The prompt's last tokens are left to be fed, so that there are queries to select pages by. None are, where the
        file has no window of what is before them.
        """
        length = min(common_prefix(self.ids, prompt), len(prompt) - 1 - TAIL)
        if length <= 0:
            return 0
        row = full.rows[b]
        pool = full.pool
        read = self._file.get_slice
        starts = [len(self.ids) - read(f"keys.{n}").get_shape()[1] for n in range(pool.config.layers)]
        needed = [max(0, length - window + 1) if pool.windows else 0 for window in pool.config.windows]
        if any(pages_for(start) * PAGE > first for start, first in zip(starts, needed, strict=True) if start):
            return 0
        names = ((f"keys.{n}", f"values.{n}", length - start) for n, start in enumerate(starts))
        pool.write(row, length, ((read(k)[:, :stop], read(v)[:, :stop]) for k, v, stop in names), max(starts))
        if pool.eagle_memory:
            keys, values, states = (read(name) for name in EAGLE_TENSORS)
            some = EagleHeadSlots(keys[:, :length], values[:, :length], states[:length])
            pool.eagle_memory.write(pool.slots(row, 0, length), some)
        return length


def _tensors(full: FullView, b: int, ids: list[int]) -> Iterator[Tensor]:
    """Yield what a file holds, in its order: ids, and K and V of each layer, which are read when their turn comes."""
    yield torch.tensor(ids)
    pool = full.pool
    row = full.rows[b]
    for layer in range(pool.config.layers):
        yield from pool.span(layer, row, pool.first_cached_token(layer, row), len(ids))
    if pool.eagle_memory:
        yield from pool.eagle_memory.read(pool.slots(row, 0, len(ids)))


def _write(file: BinaryIO, head: bytes, tensors: Iterator[Tensor]) -> None:
    data = (tensor.cpu().contiguous().view(torch.uint8).numpy().data for tensor in tensors)
    for piece in sealed(head, data):
        file.write(piece)
    file.flush()
    os.fsync(file.fileno())


def _header(maker: CacheFingerprint, pool: PagePool, row: int, tokens: int) -> bytes:
    config = pool.config
    facts = {"format": FORMAT, "kind": KIND, "fingerprint": maker.model, "kernels": maker.kernels}
    kept = [tokens - pool.first_cached_token(layer, row) for layer in range(config.layers)]
    shapes_L = [(STORED_TYPES[pool.dtype], [config.kv_heads, tokens, config.row_size]) for tokens in kept]
    layers = {f"{kind}.{layer}": shape for layer, shape in enumerate(shapes_L) for kind in ("keys", "values")}
    if features := pool.eagle_memory:
        shapes = zip(EAGLE_TENSORS, features.shapes(tokens), strict=True)
        layers |= {name: (STORED_TYPES[features.dtype], list(each)) for name, each in shapes}
    return beginning(facts, {"ids": ("I64", [tokens]), **layers})


def _is_whole(path: Path) -> bool:
    """Whether the file ends in the checksum of what comes before. Where it lies is not for the header to say."""
    digest = hashlib.blake2b(digest_size=DIGEST)
    left = path.stat().st_size - DIGEST
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(_BLOCK, left))):
            digest.update(block)
            left -= len(block)
        return file.read() == digest.digest()

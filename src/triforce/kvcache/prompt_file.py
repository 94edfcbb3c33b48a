"""The KV cache of a prompt in a file, so that a second question on the same document starts at once.

A safetensors file: `ids` (N), `keys.L` and `values.L` of each layer (G, N, D), and last `checksum`, the BLAKE2b-256 of
all bytes before it. Written layer by layer, so that a cache larger than half the memory can be saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from triforce.backends.native_loader import VARIABLE
from triforce.errors import CacheError
from triforce.kvcache.views.full import TAIL, FullView
from triforce.model.config import ModelConfig
from triforce.ragged import common_prefix

FORMAT = "triforce-kv-1"
_open: Any = safe_open  # safetensors leaves it untyped
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.uint8: "U8"}
_DIGEST = 32
_BLOCK = 1 << 22


class CacheFingerprint(NamedTuple):
    """Identity of what computed a cache. Another gives other bits, and so perhaps another text than a fresh prefill."""

    model: str
    """The fingerprint of the checkpoint."""
    kernels: str
    """`kernels.identity` of the model and of its KV memory."""


class Reservation:
    """Room for a file of so many bytes at `path`, held from before a long prefill until the file is written.

    Raises CacheError where there is none.
    """

    def __init__(self, path: Path, size: int) -> None:
        path, self._held = path.resolve(), ExitStack()
        try:
            if path.exists() and not path.is_file():
                raise OSError("it exists and is no file")
            file = self._held.enter_context(tempfile.TemporaryFile(dir=path.parent))  # noqa: SIM115  closed by `release`
            if hasattr(os, "posix_fallocate"):  # not on every system
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
        except OSError as error:
            self.release()
            raise CacheError(
                f"cannot write the KV cache to {path} ({error}); name a file in a folder you may write, on a disk with "
                f"{size / 2**20:,.0f} MiB to spare"
            ) from error

    def release(self) -> None:
        """Give the room back to whoever writes the file."""
        self._held.close()


def size_of(config: ModelConfig, dtype: torch.dtype, tokens: int) -> int:
    """Bytes of K, V and ids of so many tokens."""
    return tokens * (config.kv_size * dtype.itemsize + torch.int64.itemsize)


def save(path: Path, maker: CacheFingerprint, full: FullView, b: int, prompt: list[int]) -> None:
    """Keep what row b of an exact view has seen of `prompt`. The file appears whole or not at all; else CacheError."""
    entries = _entries(full, b, prompt[: int(full.lengths_B[b])])
    path = path.resolve()  # what a link points to is replaced, not the link
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            _write(file, maker, entries)
        os.replace(unfinished, path)
    except OSError as error:
        raise CacheError(
            f"cannot write the KV cache to {path} ({error}); free some space or name another file"
        ) from error
    finally:
        with suppress(OSError):  # whatever went wrong, Ctrl-C included; after success there is none
            unfinished.unlink()


class SavedCache:
    """A file that `save` wrote, checked. Raises CacheError."""

    def __init__(self, path: Path, maker: CacheFingerprint) -> None:
        try:
            self._file = _open(path, framework="pt")
            about = self._file.metadata() or {}
            if about.get("format") != FORMAT:
                raise CacheError(f"{path} is not a KV cache that triforce saved; make one with --save-cache")
            if about.get("fingerprint") != maker.model:
                raise CacheError(
                    f"{path} was saved with another model, dtype or context setting; load it with the same ones, "
                    "or make a new one with --save-cache"
                )
            if about.get("kernels") != maker.kernels:
                raise CacheError(
                    f"{path} was computed by other kernels ({about.get('kernels', 'unnamed')}; here {maker.kernels}), "
                    f"whose bits differ; load it with the same ones ({VARIABLE} names them) and the same chunk, "
                    "or make a new one with --save-cache"
                )
            if not _is_whole(path):
                raise CacheError(f"{path} is damaged: its checksum does not hold; make it anew with --save-cache")
            self.ids: list[int] = self._file.get_tensor("ids").tolist()
        except OSError as error:
            raise CacheError(f"cannot read the KV cache {path} ({error})") from error
        except SafetensorError as error:
            raise CacheError(
                f"{path} is damaged or no saved KV cache ({error}); make it anew with --save-cache"
            ) from error

    def restore(self, full: FullView, b: int, prompt: list[int]) -> int:
        """Let the fresh row b of an exact view see what `prompt` shares with the saved one; returns how many tokens.

        The prompt's last tokens are left to be fed, so that there are queries to select pages by.
        """
        length = min(common_prefix(self.ids, prompt), len(prompt) - 1 - TAIL)
        if length <= 0:
            return 0
        row, pool = full.rows[b], full.pool
        slots_N = pool.slots(row, 0, length)
        for layer in range(pool.config.layers):
            keys_GND, values_GND = (self._file.get_slice(f"{kind}.{layer}")[:, :length] for kind in ("keys", "values"))
            pool.kv.write(layer, slots_N, keys_GND.to(pool.device), values_GND.to(pool.device))
        pool.lengths_B[row] = length
        return length


Entry = tuple[str, torch.dtype, list[int], Callable[[], Tensor]]
"""Name, dtype and shape of a tensor, and how to get it when its turn comes."""


def _entries(full: FullView, b: int, ids: list[int]) -> list[Entry]:
    config, pool, row = full.pool.config, full.pool, full.rows[b]
    shape = [config.kv_heads, len(ids), config.head_dim]
    entries: list[Entry] = [("ids", torch.int64, [len(ids)], lambda: torch.tensor(ids))]
    for layer in range(config.layers):
        for i, kind in enumerate(("keys", "values")):
            get = partial(lambda layer, i: pool.span(layer, row, 0, len(ids))[i], layer, i)
            entries.append((f"{kind}.{layer}", pool.dtype, shape, get))
    return entries


def _write(file: BinaryIO, maker: CacheFingerprint, entries: list[Entry]) -> None:
    header = _header(maker, [(name, dtype, shape) for name, dtype, shape, _ in entries])
    digest = hashlib.blake2b(header, digest_size=_DIGEST)
    file.write(header)
    for *_, get in entries:
        data = get().cpu().contiguous().view(torch.uint8).numpy().data
        digest.update(data)
        file.write(data)
    file.write(digest.digest())
    file.flush()
    os.fsync(file.fileno())


def _header(maker: CacheFingerprint, described: list[tuple[str, torch.dtype, list[int]]]) -> bytes:
    """The head of a safetensors file: its length in 8 bytes, then JSON that places each tensor."""
    about = {"format": FORMAT, "fingerprint": maker.model, "kernels": maker.kernels}
    placed: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, dtype, shape in [*described, ("checksum", torch.uint8, [_DIGEST])]:
        begin, end = end, end + prod(shape) * dtype.itemsize
        placed[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(placed).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _is_whole(path: Path) -> bool:
    """Whether the file ends in the checksum of what comes before. Where it lies is not for the header to say."""
    digest, left = hashlib.blake2b(digest_size=_DIGEST), path.stat().st_size - _DIGEST
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(_BLOCK, left))):
            digest.update(block)
            left -= len(block)
        return file.read() == digest.digest()

"""Layout of offloaded KV: where pages lie, and how many stay at hand, as far as kernels must know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

SECTOR = 4096
"""Bytes that reads past the system's cache begin and end at."""


class PageStore(Protocol):
    """An open file, which is no longer in any folder; or memory."""

    bytes: int
    file: int
    direct: int
    """The file again, for reads past the system's cache; -1 where there are none, as of memory."""

    @property
    def memory(self) -> Tensor | None: ...

    @property
    def usage(self) -> tuple[int, int]:
        """Bytes of memory and of files."""


@dataclass(frozen=True, slots=True)
class OffloadLayout:
    """A page here is one of a single layer and KV head, keys and values."""

    store: PageStore
    page_bytes: int
    frames: int
    """Pages that stay."""
    buffers: int
    buffer_frames: int
    """What is read ahead goes through so many buffers of so many pages."""
    layers: int
    """How many layers of all pages stay."""
    moving: int
    """Pages that are being written in a layer, at most."""

    @property
    def memory(self) -> int:
        """Bytes of frames and buffers."""
        return (self.frames + self.buffers * self.buffer_frames) * self.page_bytes

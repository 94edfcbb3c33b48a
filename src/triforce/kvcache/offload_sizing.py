"""KV memory that is larger than what stays: settings of users, and how many pages stay on a CPU or on a device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import ceil, gcd
from pathlib import Path
from typing import ClassVar

import torch

from triforce.backends import dispatch
from triforce.backends.cuda.graphs import bucket
from triforce.backends.cuda.splits import SHARED
from triforce.backends.kernel_api import PAGE, SECTOR
from triforce.distributed.group import ALONE, TPGroup
from triforce.errors import CacheError, RequestError, argument
from triforce.interface.byte_size import size_of
from triforce.kvcache.retrieval_config import Budget
from triforce.model.config import ModelConfig

KINDS = ("none", "host", "file")
SPLIT = 64
"""Pages that the kernels take at a time at least."""
BUFFER = 2 << 20
"""Bytes of a buffer: what a disk reads about as fast as anything larger."""
AHEAD = 2  # buffers beyond those of the head that is worked on
SPARE = 1.25  # times what the retrieval tier reads: what comes into favour lies beside what was
WHOLE, LAYER = 272, 512
"""Tokens of a prompt that are read at a time in all layers, where it is scored, or else in one.

Where layers have windows of their own, as many are read in all layers as else in one."""


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """Place of KV pages, bytes of them in memory (None: it depends), and whole layers (None: as many as fit)."""

    kind: str = "none"
    memory: int | None = None
    layers: int | None = None

    @staticmethod
    def parse(kind: str, memory: str | int, layers: str | int) -> OffloadConfig:
        """Parse `memory` (bytes, like `512MiB`, or `auto`) and `layers` (a number or `auto`). Raises RequestError."""
        if kind not in KINDS:
            raise RequestError(f"{argument('kv_offload', kind)} is not known; choose from {', '.join(KINDS)}")
        if not (layers == "auto" or str(layers).isdecimal()):
            raise RequestError(f"{argument('kv_resident_layers')} {layers!r}: give a number of layers, or auto")
        bytes_ = None if memory == "auto" else size_of(memory)
        if kind == "none" and not (bytes_ is None and layers == "auto"):
            raise RequestError(
                f"{argument('kv_memory')} and {argument('kv_resident_layers')} are of offloaded KV; say where to with "
                f"{argument('kv_offload', 'host')} or file"
            )
        return OffloadConfig(kind, bytes_, None if layers == "auto" else int(layers))


@dataclass(frozen=True, slots=True)
class KVSizing:
    """Memory that KV needs on each rank: so many pages in all, for rows that a retrieval tier reads by a budget.

    window_pages: those of layers with a window, if these have pages of their own: they stay.
    """

    config: ModelConfig
    itemsize: int
    pages: int
    rows: int
    reach: int
    budget: Budget
    window_pages: int

    share = 0.5
    """Of what is free, where nobody says how much stays."""
    reader: ClassVar[torch.device | None] = None
    """Device that reads what does not stay: it lies in memory that is pinned."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one layer and KV head."""
        return 2 * PAGE * self.config.row_size * (1 if self.config.kv_int8 else self.itemsize)

    @property
    def layers(self) -> int:
        """Layers whose pages may leave."""
        return self.config.windows.count(0) if self.window_pages else self.config.layers

    @property
    def heads(self) -> int:
        """KV heads of these layers."""
        return self.layers * self.config.kv_heads

    @property
    def bytes(self) -> int:
        """Bytes of pages that may leave."""
        return self.heads * (self.pages + 1) * self.page_bytes

    @property
    def windows(self) -> int:
        """Bytes of layers with a window."""
        others = self.config.layers - self.layers
        return others * self.config.kv_heads * (self.window_pages + 1) * self.page_bytes

    def stored(self, layers: int) -> int:
        """Bytes of the store where so many layers stay whole."""
        return self.bytes

    @property
    def sector(self) -> int:
        """Pages that fill whole sectors."""
        return SECTOR // gcd(SECTOR, self.page_bytes)

    @property
    def buffer_frames(self) -> int:
        least = round_up(SPLIT * max(1, SECTOR // self.page_bytes), self.sector)
        return max(least, min(BUFFER // self.page_bytes, self.pages) // least * least)

    @property
    def layer(self) -> int:
        """Frames of a whole layer."""
        return self.config.kv_heads * self.pages

    @property
    def moving(self) -> int:
        """Frames of a layer's pages that are being written: they cannot leave."""
        read = (LAYER + PAGE if self.window_pages else WHOLE) // PAGE  # of a prompt
        return self.config.kv_heads * min(self.rows * (ceil(self.reach / PAGE) + 2) + read, self.pages)

    @property
    def selected(self) -> int:
        """Frames of a layer that a retrieval tier reads, and what may take their places."""
        each = min(self.budget.of(self.pages * PAGE) // PAGE, self.pages)
        return self.config.kv_heads * min(ceil(SPARE * self.rows * each), self.pages)

    @property
    def least(self) -> int:
        """Bytes with which it works at all."""
        frames = self.layers * self.moving + self.selected + self.config.kv_heads * (LAYER // PAGE + 1) + 1
        return (frames + 2 * self.buffer_frames + 3 * self.sector) * self.page_bytes + self.windows

    @property
    def free_of_all(self) -> int:
        """Bytes of memory that are free for all ranks together."""
        return free_memory()

    def require_all(self) -> None:
        """Raises CacheError where it is known that memory has no room for all of it."""

    def split(self, offload: OffloadConfig, memory: int) -> tuple[int, int, int]:
        """Frames, buffers, and layers that stay whole, of so many bytes. Raises CacheError for too few."""
        self.require(memory)
        pages = (memory - self.windows) // self.page_bytes
        wanted = ceil(self.pages / self.buffer_frames) + AHEAD
        spare = pages - self.layers * (self.moving + self.selected) - 3 * self.sector
        # A whole layer is never read again, which more buffers than those ahead are not worth.
        few = max(2, min(wanted, AHEAD + 1, spare // self.buffer_frames))
        frames = self._frames(pages, few)
        whole = min(offload.layers, self.layers) if offload.layers is not None else self._whole(frames)
        left = self._left(frames, whole)
        if whole and left < 0:
            raise self.too_many_whole(whole, -left)
        buffers = max(few, min(wanted, few + (left - self.sector) // self.buffer_frames))
        return self._frames(pages, buffers), buffers, whole

    def _frames(self, pages: int, buffers: int) -> int:
        """Frames beside so many buffers, of so many pages in all."""
        left = min(pages - buffers * self.buffer_frames, self.heads * self.pages + 2 * self.sector)
        return left // self.sector * self.sector

    def _whole(self, frames: int) -> int:
        """Layers that can stay whole."""
        return max((n for n in range(self.layers + 1) if self._left(frames, n) >= 0), default=0)

    def require(self, memory: int) -> None:
        """Raises CacheError for too few bytes."""
        if memory < self.least:
            what, fewer = ("one text", "") if self.rows == 1 else (f"{self.rows} texts at a time", ", or fewer texts")
            raise CacheError(
                f"{argument('kv_memory')} is {self._of_all(memory)}, too little for {what} of this context and "
                f"{argument('retrieval_budget')}; give {self._of_all(self.least)} or more, or a smaller "
                f"{argument('retrieval_budget')}{fewer}"
            )

    def too_many_whole(self, layers: int, missing: int) -> CacheError:
        """Return the error to raise where so many frames are missing for so many whole layers."""
        return CacheError(
            f"{layers} whole layers of KV do not fit into {argument('kv_memory')}; give "
            f"{self._of_all(missing * self.page_bytes)} more, or a smaller {argument('kv_resident_layers')}"
        )

    def _of_all(self, mine: int) -> str:
        """Format bytes of one rank as what users write for all."""
        return describe(round_up(self.config.ranks * mine, 1 << 20 if mine >= 1 << 20 else 1))

    def _left(self, frames: int, whole: int) -> int:
        """Frames beside so many whole layers and what the others need."""
        others = self.layers - whole
        return frames - 1 - whole * self.layer - others * (self.moving + self.selected)


def memory_for(offload: OffloadConfig, needs: KVSizing, ranks: TPGroup = ALONE) -> int | None:
    """Bytes of all ranks' KV that stay in memory; None is all of them: none can leave, or none has to."""
    if offload.kind == "none" or not needs.layers:
        return None
    if offload.memory is not None:
        return offload.memory
    free = ranks.broadcast(needs.free_of_all)
    everything = (needs.bytes + needs.windows) * needs.config.ranks
    return None if everything <= needs.share * free else int(needs.share * free)


def free_memory() -> int:
    """Bytes of memory that are free; 0 if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def describe(bytes_: float) -> str:
    """Bytes as users write them."""
    if bytes_ >= 2**30:
        return f"{bytes_ / 2**30:.1f}GiB"
    return f"{ceil(bytes_ / 2**20)}MiB" if bytes_ >= 2**20 else f"{ceil(bytes_ / 2**10)}KiB"


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


BUFFERS = 2
AT_ONCE = 8192
"""Tokens of a prompt whose activations lie beside one another, at most."""
AS_NUMBERS = 10
"""Bytes that a number of a layer's int8 KV takes while a prompt is read, with those that it is made of."""


def needs_of(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    pages: int,
    rows: int,
    reach: int,
    budget: Budget,
    window_pages: int = 0,
    weights: int = 0,
    padded_rows: int = 1,
    unit: int = PAGE,
) -> KVSizing:
    """Return the memory that KV of so many pages needs; `weights`: bytes that are not there yet.

    window_pages: see `KVSizing`. padded_rows: those that a pass has at least. unit: tokens whose mass is one number.
    """
    kept = pages, rows, reach, budget, window_pages
    if dispatch.layered(config, dtype, device):
        return CudaKVSizing(config, dtype.itemsize, *kept, device, weights, padded_rows, unit)
    return KVSizing(config, dtype.itemsize, *kept)


def workspace(config: ModelConfig, itemsize: int, rows: int, width: int, pages: int, unit: int = PAGE) -> int:
    """Return its bytes in a pass that observes the mass: of so many rows, tokens a row, and pages of the longest row.

    All are padded as passes are. Each query has float32 sums, a peak and a total of each split, and a log-sum-exp of
    each unit, so many tokens of a page. What a pass tells is the mass of each layer's units and its queries, of which
    there are two copies while those of the layers become one, and logits. itemsize: bytes of a query's number.
    """
    rows = bucket(rows)
    width = bucket(width)
    pages = bucket(pages, 64)
    splits = -(-pages * PAGE // SHARED)
    units = pages * PAGE // unit
    sums = 4 * rows * width * config.heads * (splits * (config.head_dim + 2) + units + 1)
    queries = itemsize * width * config.heads * config.head_dim
    told = 2 * config.layers * rows * (4 * config.kv_heads * units + queries)
    return sums + told + 4 * rows * width * config.vocab_size


@dataclass(frozen=True, slots=True)
class CudaKVSizing(KVSizing):
    """A layer is whole, or has frames for what is written and for what a retrieval tier reads."""

    device: torch.device
    weights: int
    padded_rows: int = 1
    unit: int = PAGE

    share = 0.9

    @property
    def reader(self) -> torch.device | None:  # type: ignore[override]
        return self.device if self.device.type == "cuda" else None

    @property
    def buffer_frames(self) -> int:
        """Frames of a layer, and a page of scratch for each KV head."""
        return self.config.kv_heads * (self.pages + 1)

    def stored(self, layers: int) -> int:
        """Whole layers are not in the store."""
        return (self.config.layers - layers) * self.buffer_frames * self.page_bytes

    @property
    def part(self) -> int:
        """Frames of a layer that is not whole."""
        return self.config.kv_heads + self.moving + self.selected

    @property
    def passing(self) -> int:
        """Bytes of the activations of a prompt, roughly, and of what a verification works with."""
        config = self.config
        tokens = self.pages * PAGE
        at_once = 4 * config.hidden_size + 3 * config.intermediate_size
        read = self.itemsize * (tokens * config.hidden_size + min(tokens, AT_ONCE) * at_once)
        rows = max(self.rows, self.padded_rows)
        read += AS_NUMBERS * tokens * config.kv_heads * config.head_dim * config.kv_int8
        return read + workspace(config, self.itemsize, rows, self.reach // 2 - 1, self.pages, self.unit)

    @property
    def free(self) -> int:
        """Bytes on the device beside weights and activations."""
        return max(0, free_on(self.device) - self.passing - self.weights)

    @property
    def free_of_all(self) -> int:
        """Each rank has a device of its own."""
        return self.config.ranks * self.free

    @property
    def least(self) -> int:
        layers = self.config.layers
        parts = layers * self.part + BUFFERS * self.buffer_frames
        return min(layers * self.buffer_frames, parts) * self.page_bytes

    def split(self, offload: OffloadConfig, memory: int) -> tuple[int, int, int]:
        """Frames, buffers, and layers that stay whole, of so many bytes. Raises CacheError for too few or too many."""
        self._require_free(memory)
        self.require(memory)
        frames = memory // self.page_bytes
        layers = self.config.layers
        home = self.buffer_frames
        asked = layers if offload.layers is None else min(offload.layers, layers)
        if asked == layers and frames >= layers * home:
            return layers * home, 0, layers
        frames -= BUFFERS * home
        fits = max((n for n in range(layers) if n * home + (layers - n) * self.part <= frames), default=-1)
        if fits < 0 or (offload.layers is not None and asked > fits):
            more = asked * home + (layers - asked) * self.part - frames
            raise self.too_many_whole(asked, more)
        whole = min(asked, fits)
        most = whole * home + (layers - whole) * (self.config.kv_heads + self.moving + self.layer)
        return min(frames, most), BUFFERS, whole

    def require_all(self) -> None:
        """Check a CUDA device before a prompt is read for minutes. Raises CacheError."""
        if self.reader and self.bytes > (free := self.free):
            tokens = free // (self.heads * self.page_bytes) * PAGE
            raise CacheError(
                f"the KV cache needs {describe(self.bytes)} on {self.device}, and {describe(free)} are free beside "
                f"weights and a prompt's activations, for {tokens} tokens in all; use "
                f"{argument('kv_offload', 'host')}, a smaller {argument('context')} or max_tokens, or fewer texts"
            )

    def _require_free(self, memory: int) -> None:
        """Check what is to stay, as `require_all` does."""
        if not self.reader or max(memory, self.least) <= (free := self.free):
            return
        if self.least > free:
            raise CacheError(
                f"offloaded KV needs at least {describe(self.least)} on {self.device}, and {describe(free)} are free "
                f"beside weights and a prompt's activations; use a smaller {argument('context')}, a smaller "
                f"{argument('retrieval_budget')}, or fewer texts"
            )
        every = self.config.ranks
        where = self.device if every == 1 else f"{every} devices"
        asked = describe(every * memory)
        fits = describe(every * free)
        raise CacheError(
            f"{argument('kv_memory')} is {asked}, more than the {fits} that are free on {where} beside weights and a "
            f"prompt's activations; give {fits} or less, or a smaller {argument('context')}"
        )


def free_on(device: torch.device) -> int:
    """Bytes that this process may still take on a CUDA device, as far as its share goes if it has one."""
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    share = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return int(min(free + torch.cuda.memory_reserved(device) - used, share - used))

"""KV that stays on a device which takes it in whole layers: two of them on their way, and parts of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triforce.backends import dispatch
from triforce.backends.cuda.workspace import workspace
from triforce.backends.kernel_api import PAGE
from triforce.errors import CacheError, argument
from triforce.kvcache.offload.sizing import KVSizing, OffloadConfig, describe
from triforce.kvcache.retrieval_config import Budget
from triforce.model.config import ModelConfig

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
        config, tokens = self.config, self.pages * PAGE
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
        frames, layers, home = memory // self.page_bytes, self.config.layers, self.buffer_frames
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
        asked, fits = describe(every * memory), describe(every * free)
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

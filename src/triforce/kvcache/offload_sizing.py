"""Sizing of offloaded KV: the user's settings, and how many pages stay in memory on a CPU or on a device."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd
from typing import ClassVar

from triforce.arrays import DType, is_gpu, itemsize
from triforce.backends import dispatch
from triforce.backends.cuda.splits import SHARED_UNITS, bucket
from triforce.backends.kernel_api import PAGE, SECTOR
from triforce.distributed.group import ALONE, TPGroup
from triforce.errors import CacheError, RequestError, argument
from triforce.interface.quantities import size_of
from triforce.kvcache.host_memory import free_memory
from triforce.kvcache.retrieval_config import Budget
from triforce.model.config import ModelConfig

KINDS = ("none", "host", "file")
MIN_KERNEL_PAGES = 64
"""Pages that the kernels take in one call at least."""
BUFFER_BYTES = 2 << 20
"""Bytes of a read-ahead buffer. A disk reads larger blocks hardly faster."""
READ_AHEAD = 2  # buffers beyond those of the KV head that is being computed
SELECTION_SLACK = 1.25  # factor on the frames of the retrieval tier: newly selected pages lie beside the old ones
PROMPT_TOKENS_ALL_LAYERS = 272
"""Most prompt tokens of a pass through all layers, which a prompt with log-probabilities takes."""
PROMPT_TOKENS_ONE_LAYER = 512
"""Most prompt tokens of any other prompt pass. It goes through one layer, or through all if some have window pages."""


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """Settings of KV offloading.

    kind: one of `KINDS`. memory: bytes of KV in memory; None: see `memory_for`. layers: layers that stay in memory
    whole; None: as many as fit.
    """

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
                f"{argument('kv_memory')} and {argument('kv_resident_layers')} apply to offloaded KV only; add "
                f"{argument('kv_offload', 'host')} or file"
            )
        return OffloadConfig(kind, bytes_, None if layers == "auto" else int(layers))


@dataclass(frozen=True, slots=True)
class KVSizing:
    """Memory that KV needs on each rank. A frame is the memory of one page of one layer and KV head.

    pages: pages of all rows. reach: tokens that tiers write beyond the committed length at most. budget: tokens that
    the retrieval tier reads. window_pages: pages of layers with a window, if these have pages of their own; they stay
    in memory.
    """

    config: ModelConfig
    itemsize: int
    pages: int
    rows: int
    reach: int
    budget: Budget
    window_pages: int

    memory_share = 0.5
    """Share of the free memory that KV takes where the user sets no limit."""
    reader: ClassVar[str | None] = None
    """Device that reads offloaded pages: the host memory that holds them is pinned for it."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one layer and KV head."""
        return 2 * PAGE * self.config.row_size * (1 if self.config.kv_int8 else self.itemsize)

    @property
    def offloadable_layers(self) -> int:
        """Count of layers whose pages may be offloaded."""
        return self.config.windows.count(0) if self.window_pages else self.config.layers

    @property
    def offloadable_heads(self) -> int:
        """Count of KV heads of all `offloadable_layers`."""
        return self.offloadable_layers * self.config.kv_heads

    @property
    def offloadable_bytes(self) -> int:
        """Bytes of the pages that may be offloaded."""
        return self.offloadable_heads * (self.pages + 1) * self.page_bytes

    @property
    def window_bytes(self) -> int:
        """Bytes of the pages of layers with a window."""
        window_layers = self.config.layers - self.offloadable_layers
        return window_layers * self.config.kv_heads * (self.window_pages + 1) * self.page_bytes

    def store_bytes(self, layers: int) -> int:
        """Bytes of the backing store while `layers` layers stay whole in memory."""
        return self.offloadable_bytes

    @property
    def sector_pages(self) -> int:
        """Smallest count of pages that fills whole sectors."""
        return SECTOR // gcd(SECTOR, self.page_bytes)

    @property
    def buffer_frames(self) -> int:
        """Frames of a read-ahead buffer."""
        min_frames = round_up(MIN_KERNEL_PAGES * max(1, SECTOR // self.page_bytes), self.sector_pages)
        return max(min_frames, min(BUFFER_BYTES // self.page_bytes, self.pages) // min_frames * min_frames)

    @property
    def layer_frames(self) -> int:
        """Frames of a whole layer."""
        return self.config.kv_heads * self.pages

    @property
    def written_frames(self) -> int:
        """Frames of a layer's pages that are being written. They cannot be offloaded."""
        prompt_pages = (PROMPT_TOKENS_ONE_LAYER + PAGE if self.window_pages else PROMPT_TOKENS_ALL_LAYERS) // PAGE
        return self.config.kv_heads * min(self.rows * (ceil(self.reach / PAGE) + 2) + prompt_pages, self.pages)

    @property
    def selected_frames(self) -> int:
        """Frames of a layer that the retrieval tier reads, and spare ones for newly selected pages."""
        row_pages = min(self.budget.of(self.pages * PAGE) // PAGE, self.pages)
        return self.config.kv_heads * min(ceil(SELECTION_SLACK * self.rows * row_pages), self.pages)

    @property
    def min_bytes(self) -> int:
        """Least bytes of KV in memory with which decoding works."""
        frames = (
            self.offloadable_layers * self.written_frames
            + self.selected_frames
            + self.config.kv_heads * (PROMPT_TOKENS_ONE_LAYER // PAGE + 1)
            + 1
        )
        return (frames + 2 * self.buffer_frames + 3 * self.sector_pages) * self.page_bytes + self.window_bytes

    @property
    def free_bytes_all_ranks(self) -> int:
        """Free bytes of memory for all ranks together."""
        return free_memory()

    def require_all(self) -> None:
        """Raise CacheError where KV certainly does not fit into memory. The memory of a CPU is not checked."""

    def split(self, offload: OffloadConfig, memory: int) -> tuple[int, int, int]:
        """Return how `memory` bytes are used: frames, buffers, and layers that stay whole. Raises CacheError."""
        self.require(memory)
        pages = (memory - self.window_bytes) // self.page_bytes
        useful_buffers = ceil(self.pages / self.buffer_frames) + READ_AHEAD
        partial_frames = self.offloadable_layers * (self.written_frames + self.selected_frames)
        spare_pages = pages - partial_frames - 3 * self.sector_pages
        # A whole layer is never read from the store again: it is worth more than buffers beyond the read-ahead.
        min_buffers = max(2, min(useful_buffers, READ_AHEAD + 1, spare_pages // self.buffer_frames))
        frames = self._frames(pages, min_buffers)
        resident_layers = (
            min(offload.layers, self.offloadable_layers) if offload.layers is not None else self._fitting_layers(frames)
        )
        unused_frames = self._unused_frames(frames, resident_layers)
        if resident_layers and unused_frames < 0:
            raise self.resident_layers_error(resident_layers, -unused_frames)
        buffers = max(
            min_buffers, min(useful_buffers, min_buffers + (unused_frames - self.sector_pages) // self.buffer_frames)
        )
        return self._frames(pages, buffers), buffers, resident_layers

    def _frames(self, pages: int, buffers: int) -> int:
        """Return the frames that `pages` pages leave beside `buffers` buffers."""
        useful_pages = self.offloadable_heads * self.pages + 2 * self.sector_pages
        available_pages = min(pages - buffers * self.buffer_frames, useful_pages)
        return available_pages // self.sector_pages * self.sector_pages

    def _fitting_layers(self, frames: int) -> int:
        """Return how many layers can stay whole."""
        return max((n for n in range(self.offloadable_layers + 1) if self._unused_frames(frames, n) >= 0), default=0)

    def require(self, memory: int) -> None:
        """Raises CacheError for too few bytes."""
        if memory < self.min_bytes:
            texts, advice = ("one text", "") if self.rows == 1 else (f"{self.rows} texts at a time", ", or fewer texts")
            raise CacheError(
                f"{argument('kv_memory')} is {self._all_ranks(memory)}, too little for {texts} of this context and "
                f"{argument('retrieval_budget')}; give {self._all_ranks(self.min_bytes)} or more, or a smaller "
                f"{argument('retrieval_budget')}{advice}"
            )

    def resident_layers_error(self, layers: int, missing: int) -> CacheError:
        """Return the error to raise where `missing` frames are missing for `layers` whole layers."""
        return CacheError(
            f"{layers} whole layers of KV do not fit into {argument('kv_memory')}; give "
            f"{self._all_ranks(missing * self.page_bytes)} more, or a smaller {argument('kv_resident_layers')}"
        )

    def _all_ranks(self, rank_bytes: int) -> str:
        """Format the bytes of one rank as the size that users write for all ranks."""
        return format_bytes(round_up(self.config.ranks * rank_bytes, 1 << 20 if rank_bytes >= 1 << 20 else 1))

    def _unused_frames(self, frames: int, resident_layers: int) -> int:
        """Return the frames that whole layers and the minima of other layers leave; negative: missing frames."""
        partial_layers = self.offloadable_layers - resident_layers
        return (
            frames
            - 1
            - resident_layers * self.layer_frames
            - partial_layers * (self.written_frames + self.selected_frames)
        )


def memory_for(offload: OffloadConfig, sizing: KVSizing, ranks: TPGroup = ALONE) -> int | None:
    """Return the bytes of KV, of all ranks, that stay in memory. None: no KV is offloaded."""
    if offload.kind == "none" or not sizing.offloadable_layers:
        return None
    if offload.memory is not None:
        return offload.memory
    free = ranks.broadcast(sizing.free_bytes_all_ranks)
    everything = (sizing.offloadable_bytes + sizing.window_bytes) * sizing.config.ranks
    return None if everything <= sizing.memory_share * free else int(sizing.memory_share * free)


def format_bytes(bytes_: float) -> str:
    """Format bytes as users write them."""
    if bytes_ >= 2**30:
        return f"{bytes_ / 2**30:.1f}GiB"
    return f"{ceil(bytes_ / 2**20)}MiB" if bytes_ >= 2**20 else f"{ceil(bytes_ / 2**10)}KiB"


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


CUDA_BUFFERS = 2
MLP_TOKENS = 8192
"""Tokens of a prompt whose MLP activations are in memory at once, at most."""
INT8_PREFILL_BYTES = 10
"""Bytes per number of a layer's int8 KV during prefill, with the number before rounding."""


def kv_sizing(
    config: ModelConfig,
    dtype: DType,
    device: str,
    pages: int,
    rows: int,
    reach: int,
    budget: Budget,
    window_pages: int = 0,
    weight_bytes: int = 0,
    padded_rows: int = 1,
    unit: int = PAGE,
) -> KVSizing:
    """Return the sizing of KV for a device. For `pages` to `window_pages` see `KVSizing`.

    weight_bytes: bytes of weights that are not loaded yet. padded_rows: rows of a pass at least. unit: tokens whose
    attention mass is one number.
    """
    shape = pages, rows, reach, budget, window_pages
    if dispatch.streams_layers(config, dtype, device):
        return CudaKVSizing(config, itemsize(dtype), *shape, device, weight_bytes, padded_rows, unit)
    return KVSizing(config, itemsize(dtype), *shape)


def workspace(config: ModelConfig, itemsize: int, rows: int, width: int, pages: int, unit: int = PAGE) -> int:
    """Return the bytes of a pass's workspace while it observes attention mass.

    rows, width, pages: rows, tokens a row, and pages of the longest row; padded as passes are. unit: tokens whose mass
    is one number. itemsize: bytes of a query's number. Each query has float32 sums, a maximum and a total of each
    split, and a log-sum-exp of each unit. A pass returns logits, and for each layer the mass of its units and its
    queries; there are two copies of these while the layers are concatenated.
    """
    rows = bucket(rows)
    width = bucket(width)
    pages = bucket(pages, 64)
    splits = -(-pages * PAGE // SHARED_UNITS)
    units = pages * PAGE // unit
    sums = 4 * rows * width * config.heads * (splits * (config.head_dim + 2) + units + 1)
    queries = itemsize * width * config.heads * config.head_dim
    outputs = 2 * config.layers * rows * (4 * config.kv_heads * units + queries)
    return sums + outputs + 4 * rows * width * config.vocab_size


@dataclass(frozen=True, slots=True)
class CudaKVSizing(KVSizing):
    """Sizing on a CUDA device. A layer stays whole, or has frames for written pages and for the retrieval tier.

    weight_bytes, padded_rows, unit: see `kv_sizing`.
    """

    device: str
    weight_bytes: int
    padded_rows: int = 1
    unit: int = PAGE

    memory_share = 0.9

    @property
    def reader(self) -> str | None:  # type: ignore[override]
        return self.device if is_gpu(self.device) else None

    @property
    def buffer_frames(self) -> int:
        """Frames of a layer with a scratch page for each KV head."""
        return self.config.kv_heads * (self.pages + 1)

    def store_bytes(self, layers: int) -> int:
        """Bytes of the backing store, which does not hold the `layers` whole layers."""
        return (self.config.layers - layers) * self.buffer_frames * self.page_bytes

    @property
    def partial_layer_frames(self) -> int:
        """Frames of a layer that is not whole."""
        return self.config.kv_heads + self.written_frames + self.selected_frames

    @property
    def activation_bytes(self) -> int:
        """Bytes of a prompt's activations, roughly, and of a verification's workspace."""
        config = self.config
        tokens = self.pages * PAGE
        token_values = 4 * config.hidden_size + 3 * config.intermediate_size
        prompt_bytes = self.itemsize * (tokens * config.hidden_size + min(tokens, MLP_TOKENS) * token_values)
        rows = max(self.rows, self.padded_rows)
        prompt_bytes += INT8_PREFILL_BYTES * tokens * config.kv_heads * config.head_dim * config.kv_int8
        return prompt_bytes + workspace(config, self.itemsize, rows, self.reach // 2 - 1, self.pages, self.unit)

    @property
    def free_bytes(self) -> int:
        """Free bytes on the device beside weights and activations."""
        return max(0, _free_on(self.device) - self.activation_bytes - self.weight_bytes)

    @property
    def free_bytes_all_ranks(self) -> int:
        """Free bytes on the devices of all ranks."""
        return self.config.ranks * self.free_bytes

    @property
    def min_bytes(self) -> int:
        layers = self.config.layers
        partial_frames = layers * self.partial_layer_frames + CUDA_BUFFERS * self.buffer_frames
        return min(layers * self.buffer_frames, partial_frames) * self.page_bytes

    def split(self, offload: OffloadConfig, memory: int) -> tuple[int, int, int]:
        """Return how `memory` bytes are used: frames, buffers, and layers that stay whole.

        Raises CacheError for too few bytes, or for more than the device has.
        """
        self._require_free(memory)
        self.require(memory)
        frames = memory // self.page_bytes
        layers = self.config.layers
        resident_frames = self.buffer_frames
        requested_layers = layers if offload.layers is None else min(offload.layers, layers)
        if requested_layers == layers and frames >= layers * resident_frames:
            return layers * resident_frames, 0, layers
        frames -= CUDA_BUFFERS * resident_frames
        fitting_layers = max(
            (n for n in range(layers) if n * resident_frames + (layers - n) * self.partial_layer_frames <= frames),
            default=-1,
        )
        if fitting_layers < 0 or (offload.layers is not None and requested_layers > fitting_layers):
            missing_frames = (
                requested_layers * resident_frames + (layers - requested_layers) * self.partial_layer_frames - frames
            )
            raise self.resident_layers_error(requested_layers, missing_frames)
        resident_layers = min(requested_layers, fitting_layers)
        useful_frames = resident_layers * resident_frames + (layers - resident_layers) * (
            self.config.kv_heads + self.written_frames + self.layer_frames
        )
        return min(frames, useful_frames), CUDA_BUFFERS, resident_layers

    def require_all(self) -> None:
        """Raises CacheError before a prompt is read for minutes, if KV does not fit onto the CUDA device."""
        if self.reader and self.offloadable_bytes > (free := self.free_bytes):
            tokens = free // (self.offloadable_heads * self.page_bytes) * PAGE
            raise CacheError(
                f"the KV cache needs {format_bytes(self.offloadable_bytes)} on {self.device}, and {format_bytes(free)} "
                f"are free beside weights and a prompt's activations, for {tokens} tokens in all; use "
                f"{argument('kv_offload', 'host')}, a smaller {argument('context')} or max_tokens, or fewer texts"
            )

    def _require_free(self, memory: int) -> None:
        """Raises CacheError where `memory` bytes of KV do not fit onto the CUDA device."""
        if not self.reader or max(memory, self.min_bytes) <= (free := self.free_bytes):
            return
        if self.min_bytes > free:
            raise CacheError(
                f"offloaded KV needs at least {format_bytes(self.min_bytes)} on {self.device}, and "
                f"{format_bytes(free)} are free beside weights and a prompt's activations; use a smaller "
                f"{argument('context')}, a smaller {argument('retrieval_budget')}, or fewer texts"
            )
        rank_count = self.config.ranks
        device_names = self.device if rank_count == 1 else f"{rank_count} devices"
        requested = format_bytes(rank_count * memory)
        available = format_bytes(rank_count * free)
        raise CacheError(
            f"{argument('kv_memory')} is {requested}, more than the {available} that are free on {device_names} beside "
            f"weights and a prompt's activations; give {available} or less, or a smaller {argument('context')}"
        )


def _free_on(device: str) -> int:
    from triforce.backends.torch.devices import free_bytes

    return free_bytes(device)

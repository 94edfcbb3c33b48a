"""Contract of a set of kernels: models that run passes, and the KV memory that models are given.

A view of the KV memory (see `triforce.kvcache`) describes a pass as a `ForwardBatch`; a `ModelBackend` runs it; a
`KVBackend` stores keys and values, and attends. Native kernels take and return numpy arrays; other kernels torch
tensors on their device. Token ids, columns and counts are numpy arrays for all.

Shape suffixes: B rows, T tokens fed in one pass, N = B * T, J scored columns, L layers, C hidden size, V vocabulary,
H query heads, G KV heads, D head size, F = D / 2, U units of a list of keys, S layers whose outputs are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from triforce.arrays import Array
from triforce.distributed.group import TPGroup
from triforce.interface.outputs import KVMemoryUsage
from triforce.ragged import Ints

Rotation = tuple[Array, Array]
"""cos and sin of each token's position, (N, F) each, with yarn's factor on them."""

KeysValues = tuple[Array, Array]
"""Keys and values, (G, N, D) each."""

PAGE = 16
"""Tokens per page of KV memory. Page 0 is scratch: padding is written there, and reads of it have no effect."""


def pages_for(tokens: int) -> int:
    """Return the pages that `tokens` tokens need."""
    return -(-tokens // PAGE)


class Search(NamedTuple):
    """Search among row b's units [start[b], stop[b]) for the `picks[b]` units whose keys are nearest to its queries.

    Attention may leave out the other units of that range. The memory may estimate which units are nearest, and may
    attend to all of them.
    """

    start: list[int]
    stop: list[int]
    picks: list[int]


@dataclass(frozen=True, slots=True)
class PageTable:
    """Keys that the queries of a pass see, row by row.

    Key i of row b lies at token `i % unit` of unit `units[b, i // unit]` of the memory (`units[b, g, ...]` where each
    KV head has its own list); a unit is a page, or an equal part of one. Row b has `counts[b]` queries. Query t is
    itself key `starts[b] + t` and sees the keys up to it. With a `window` it sees only the first `sinks` and the last
    `window` of these.
    """

    units: Array
    """int32, (B, U) or (B, G, U); (layers, B, G, U) where each of several layers has its own."""
    starts: list[int]
    counts: list[int]
    unit: int = PAGE
    sinks: int = 0
    window: int = 0
    low_precision_ends: list[int] = field(default_factory=list)
    """Ends of the keys that may be read in fewer bits: row b's keys below `low_precision_ends[b]`, all committed.

    They are read from int8 copies, or from the upper nibbles of int8 KV. An empty list: all keys are read exactly.
    """
    search: Search | None = None
    """Units that attention may leave out, all committed; for lists that all KV heads share, without a window."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One pass: each row's new tokens, the first at position `positions[b]`, and the keys that they see.

    `views` covers all layers in order: a number of layers, and their page table. Token t of a row is key
    `starts[b] + t` of the table, so the table names its slot too. With a window, queries for the sinks are rotated to
    the position that the query has in the sequence [sinks | window].
    """

    positions: list[int]
    views: list[tuple[int, PageTable]]
    observe: bool = False
    """Whether the output has the rotated queries."""
    return_mass: bool = False
    """Whether the output has the attention mass; for a pass of one view only."""
    min_shape: tuple[int, int] = (1, 1)
    """Least rows, and least tokens per row, to which memories must pad a pass if their bits depend on its shape."""
    past_committed: bool = False
    """Whether each row's keys before its new tokens are committed, so that offloaded memory may evict them."""
    retained_pages: int = 0
    """Number of pages of most mass that offloaded memory keeps resident, per row, layer and KV head, after the pass."""
    trial: bool = False
    """Whether the pass is a trial whose shape may never occur again, so that capturing it would not pay."""
    tables: list[list[int]] = field(default_factory=list)
    """Each row's pages in order, on the host; empty where no offloaded memory runs the pass."""
    state_layers: tuple[int, ...] = ()
    """Numbers of layers after which the residual stream is returned; neither 0 nor all layers."""

    def layer_tables(self) -> list[PageTable]:
        """Return the page table of each layer."""
        layer_tables: list[PageTable] = []
        for layers, page_table in self.views:
            units_by_layer = page_table.units if page_table.units.ndim == 4 else [page_table.units] * layers
            layer_tables += [replace(page_table, units=units) for units in units_by_layer]
        return layer_tables


class ForwardOutput(NamedTuple):
    """Logits of a pass, float32 (B, J, V); if observed, rotated queries (L, B, T, H, D) and mass (L, B, G, U).

    `states`: the residual stream (S, B, T, C) after each number of layers in `ForwardBatch.state_layers`; undefined for
    padding. `mean_distinct_experts`: number of distinct experts that the pass's first `SAMPLED_TOKENS` tokens read, a
    mean over the layers with experts.
    """

    logits_BJV: Array
    queries_LBTHD: Array | None
    mass_LBGU: Array | None
    states_SBTC: Array | None = None
    mean_distinct_experts: float = 0.0


LayerAttention = Callable[[int, Array, Array, Array], tuple[Array, Array, Array]]
"""Attention of one pass: from a layer and its q (B, T, H, D), k and v (B, T, G, D), not yet rotated.

Stores k and v. Returns the rotated queries; the mixed values (B, T, H, D), zeros where a row has fewer queries; and
with `return_mass` the attention mass of each unit, summed over a row's queries and the query heads of a KV head:
float32 (B, G, U), else empty.
"""


class KVBackend(Protocol):
    """Keys and values of every layer of a model, in pages. A slot is a token's place: page * PAGE + offset."""

    width_independent: bool
    """Whether the bits of a query's result are the same for any number of queries and rows in a pass."""
    searches: bool
    """Whether attention skips the units that a search leaves out, so that long contexts cost little."""

    @property
    def xp(self) -> Any:
        """Namespace of the array API standard for this memory's arrays: units, slots, keys, values, queries, mass."""

    @property
    def device(self) -> str:
        """Device of these arrays, `cpu` or such as `cuda:0`."""

    def array(self, source: Array) -> Array:
        """Return an array as one of this memory's kind, on its device. Bits of bfloat16 become bfloat16."""

    def numbers(self, rows_R: Array) -> Array:
        """Return the numbers (..., D) of rows of K or V, or of queries, in float32 (see `kv_rows`)."""

    def empty(self, shape: tuple[int, ...]) -> Array:
        """Return an array of this memory's type, uninitialised. Raises CacheError where memory is short."""

    def layer_attention(self, batch: ForwardBatch, width: int) -> LayerAttention:
        """Return attention of a pass of `width` tokens a row, for models that run layer by layer, layers in order."""

    def attend(self, layer: int, q_BTHD: Array, page_table: PageTable) -> Array:
        """Attend with rotated queries, without writing: return the mixed values (B, T, H, D)."""

    def write(self, layer: int, slots_N: Array, k_GND: Array, v_GND: Array) -> None:
        """Write rotated k and v to slots, rounded to the memory's type. They may be host arrays."""

    def read(self, layer: int, slots_N: Array) -> KeysValues:
        """Return K and V of slots, each (G, N, D)."""

    def view(self, layer: int, first_slot: int, count: int) -> KeysValues:
        """Return K and V of `count` slots from `first_slot` on, each (G, N, D): read-only, a view where possible."""


class OffloadedKVBackend(KVBackend, Protocol):
    """KV memory with most pages in a store. It raises CacheError, which fails the pass or prompt under way."""

    max_resident_layers: int
    """Number of layers that fit in resident memory with all their pages."""

    @property
    def bytes(self) -> KVMemoryUsage:
        """Return the bytes of each kind of memory."""

    def prefer(self, layers: Collection[int]) -> None:
        """Keep these layers resident before others."""

    def reserve(self, pages: Sequence[int]) -> None:
        """Reserve space in the store for pages that will be written."""

    def forget(self, pages: Sequence[int]) -> None:
        """Drop the contents of freed pages."""

    def commit(self, pages: Sequence[int]) -> None:
        """Mark pages as full of committed tokens: they may leave memory. Raises CacheError."""

    def read_prompt(self, model: ModelBackend, ids_1T: Ints, batch: ForwardBatch) -> Generator[int, None, None]:
        """Run a pass over many unscored tokens of one row, all of them through one layer before the next.

        The KV of each layer is written to the store once. Yields the progress, as `Decoder.read` does. Raises
        CacheError.
        """


class LayerBackend(Protocol):
    """One layer of a decoder without its attention."""

    def qkv(self, x_NC: Array) -> tuple[Array, ...]:
        """Return queries (N, H, D), keys and values (N, G, D), not yet rotated."""

    def finish(self, x_NC: Array, attn_out_NQ: Array) -> int:
        """Add the outputs of attention and MLP to the residual stream, in place.

        Returns the number of distinct experts that the first `SAMPLED_TOKENS` tokens read; 0 without experts.
        """


class LayerShard(Protocol):
    """One rank's part of a layer: its heads, and its slice of each other matrix.

    The slice has some outputs; unless the ranks are exact, o_proj and down_proj have some inputs instead.
    """

    def qkv(self, x_NC: Array, ranks: TPGroup) -> tuple[Array, ...]:
        """Return queries, keys and values of this rank's heads, as `LayerBackend.qkv` returns them."""

    def finish(self, x_NC: Array, attn_out_NQ: Array, ranks: TPGroup) -> int:
        """Do what `LayerBackend.finish` does, from this rank's heads of attention and the other ranks' parts."""


class ModelShard(Protocol):
    """One rank's part of a model: ids count from its first token, and its logits cover its own tokens only."""

    width_independent: bool

    @property
    def blocks(self) -> Sequence[LayerShard]: ...

    def embed(self, ids_N: Ints) -> Array: ...

    def head_rows(self, ids_N: Ints) -> Array: ...

    def head(self, x_NC: Array) -> Array: ...


class Embedder(Protocol):
    """Source of the residual stream: the embedding of tokens."""

    def embed(self, ids_N: Ints) -> Array:
        """Return the residual stream (N, C) before the first layer."""


class ModelBackend(Embedder, Protocol):
    """A decoder's weights, layer by layer, packed for products, and the passes through them."""

    width_independent: bool
    """Whether, given equal attention, the bits of a token's logits are the same for any number of tokens in a pass."""

    @property
    def blocks(self) -> Sequence[LayerBackend]: ...

    def head(self, x_NC: Array) -> Array:
        """Return the logits, float32 (N, V)."""

    def forward(self, ids_BT: Ints, kv: KVBackend, batch: ForwardBatch, at_BJ: Ints | None) -> ForwardOutput:
        """Run a pass of the whole model: `kv` stores its tokens, columns `at_BJ` are scored (None: all, J = T).

        Raises CacheError where offloaded KV cannot be read.
        """


Forward = Callable[[ModelBackend, Ints, KVBackend, ForwardBatch, Ints | None], ForwardOutput]
"""Implementation of `ModelBackend.forward` for any model that has layers."""


SECTOR = 4096
"""Alignment in bytes of reads that bypass the system's page cache."""


class PageStore(Protocol):
    """Store of pages: an open file that is already unlinked, or memory."""

    bytes: int
    """Size of the store."""
    file: int
    """Descriptor of the file."""
    direct: int
    """Second descriptor of the file, for reads that bypass the page cache; -1 if there is none."""

    @property
    def memory(self) -> Array | None: ...

    @property
    def usage(self) -> tuple[int, int]:
        """Return the bytes of memory and of files."""


@dataclass(frozen=True, slots=True)
class OffloadLayout:
    """Sizes of offloaded KV memory. A page here has the keys and values of one layer and one KV head."""

    store: PageStore
    page_bytes: int
    frames: int
    """Number of resident pages."""
    buffers: int
    """Number of buffers for pages that are read ahead."""
    buffer_frames: int
    """Number of pages of a buffer."""
    resident_layers: int
    """Number of layers that are resident with all their pages."""
    written_pages: int
    """Largest number of pages of one layer that are being written at once."""

    @property
    def memory(self) -> int:
        """Return the bytes of frames and buffers."""
        return (self.frames + self.buffers * self.buffer_frames) * self.page_bytes

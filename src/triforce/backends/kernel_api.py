"""Contract of a set of kernels: models that run passes, and the KV memory that models are given.

A view of the KV memory (see `triforce.kvcache`) describes a pass as a `ForwardBatch`; a `ModelBackend` runs it; a
`KVBackend` stores keys and values, and attends.

Shape suffixes: B rows, T tokens fed in one pass, N = B * T, J scored columns, L layers, C hidden size, V vocabulary,
H query heads, G KV heads, D head size, F = D / 2, U units of a list of keys, S layers whose outputs are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from triforce.distributed.group import TPGroup
from triforce.interface.outputs import KVMemoryUsage

Device = torch.device | str

Rotation = tuple[Tensor, Tensor]
"""cos and sin of each token's position, (N, F) each, with yarn's factor on them."""

KeysValues = tuple[Tensor, Tensor]
"""Keys and values, (G, N, D) each."""

PAGE = 16
"""Tokens per page of KV memory. Page 0 is scratch: padding is written there, and reads of it have no effect."""


def pages_for(tokens: int) -> int:
    """Return the pages that `tokens` tokens need."""
    return -(-tokens // PAGE)


class Search(NamedTuple):
    """Search of row b's units [start[b], stop[b]): its queries need attend only to the nearest `picks[b]` of them.

    An estimate may say which units are nearest, and a memory may attend to all of them.
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

    units: Tensor
    """int32, (B, U) or (B, G, U); (layers, B, G, U) where each of several layers has its own."""
    starts: list[int]
    counts: list[int]
    unit: int = PAGE
    sinks: int = 0
    window: int = 0
    coarse: list[int] = field(default_factory=list)
    """Keys of row b below `coarse[b]` may be read as int8 copies, or as half of int8 KV; all of them are committed."""
    search: Search | None = None
    """Units that attention may leave out, all committed; for lists that all KV heads share, without a window."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One pass: each row's new tokens, the first at position `positions[b]`, and the keys that they see.

    `views` covers all layers in order: a number of layers, and their page table. Token t of a row is key
    `starts[b] + t` of the table, so the table names its slot too. With a window a query meets the sinks from its place
    in [sinks | window].
    """

    positions: list[int]
    views: list[tuple[int, PageTable]]
    observe: bool = False
    """Return rotated queries too, and with `return_mass`, for a pass of one view only, their attention mass."""
    return_mass: bool = False
    min_shape: tuple[int, int] = (1, 1)
    """Least rows, and tokens a row, to which a memory whose bits depend on a pass's shape must pad the pass."""
    exact: bool = False
    """Each row's keys before its new ones are committed: offloaded memory may evict them."""
    keep: int = 0
    """Pages of most mass, of each row, layer and KV head, that offloaded memory keeps resident after the pass."""
    trial: bool = False
    """The pass is a trial that may never come again, so that capturing it would not pay."""
    tables: list[list[int]] = field(default_factory=list)
    """Each row's pages in order, on the host; empty where no offloaded memory runs the pass."""
    states: tuple[int, ...] = ()
    """Numbers of layers after which the residual stream is returned; neither 0 nor all layers."""

    def lists(self) -> list[PageTable]:
        """Return the page table of each layer."""
        layer_tables: list[PageTable] = []
        for layers, lists in self.views:
            units_by_layer = lists.units if lists.units.ndim == 4 else [lists.units] * layers
            layer_tables += [replace(lists, units=units) for units in units_by_layer]
        return layer_tables


class ForwardOutput(NamedTuple):
    """Logits of a pass, float32 (B, J, V); if observed, rotated queries (L, B, T, H, D) and mass (L, B, G, U).

    `states`: the residual stream (S, B, T, C) after each of `ForwardBatch.states` layers; undefined for padding.
    `touched`: distinct experts of the first tokens, at most `SAMPLED`, in the mean of the layers that have experts.
    """

    logits_BJV: Tensor
    queries_LBTHD: Tensor | None
    mass_LBGU: Tensor | None
    states_SBTC: Tensor | None = None
    touched: float = 0.0


LayerAttention = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Attention of one pass: from a layer and its q (B, T, H, D), k and v (B, T, G, D), not yet rotated.

Stores k and v. Returns the rotated queries; the mixed values (B, T, H, D), zeros where a row has fewer queries; and
with `return_mass` the attention mass of each unit, summed over a row's queries and the query heads of a KV head:
float32 (B, G, U), else empty.
"""


class KVBackend(Protocol):
    """Keys and values of every layer of a model, in pages. A slot is a token's place: page * PAGE + offset."""

    width_independent: bool
    """A query's result has the same bits however many queries and rows a pass has."""
    searches: bool
    """Attention skips the units that a search leaves out, so that long lists cost little."""

    def layer_attention(self, batch: ForwardBatch, width: int) -> LayerAttention:
        """Return attention of a pass of `width` tokens a row, for models that run layer by layer, layers in order."""

    def attend(self, layer: int, q_BTHD: Tensor, lists: PageTable) -> Tensor:
        """Attend with rotated queries, without writing: return the mixed values (B, T, H, D)."""

    def write(self, layer: int, slots_N: Tensor, k_GND: Tensor, v_GND: Tensor) -> None:
        """Write rotated k and v to slots, rounded to the memory's type."""

    def read(self, layer: int, slots_N: Tensor) -> KeysValues:
        """Return K and V of slots, each (G, N, D)."""

    def view(self, layer: int, first_slot: int, count: int) -> KeysValues:
        """Return K and V of `count` slots from `first_slot` on, each (G, N, D): read-only, a view where possible."""


class OffloadedKVBackend(KVBackend, Protocol):
    """KV memory with most pages in a store. It raises CacheError, which fails the pass or prompt under way."""

    whole_layers: int
    """Layers that fit in resident memory whole."""

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

    def read_prompt(self, model: ModelBackend, ids_1T: Tensor, batch: ForwardBatch) -> Generator[int, None, None]:
        """Run a pass over many unscored tokens of one row, all of them through one layer before the next.

        So KV is stored once. Yields the tokens that all work so far is worth. Raises CacheError.
        """


class LayerBackend(Protocol):
    """One layer of a decoder without its attention."""

    def qkv(self, x_NC: Tensor) -> tuple[Tensor, ...]:
        """Return queries (N, H, D), keys and values (N, G, D), not yet rotated."""

    def finish(self, x_NC: Tensor, attn_out_NQ: Tensor) -> int:
        """Add the outputs of attention and MLP to the residual stream, in place.

        Returns how many distinct experts the first tokens, at most `SAMPLED`, touch; 0 without experts.
        """


class LayerShard(Protocol):
    """One rank's part of a layer: some heads, and some outputs, or for o_proj and down_proj inputs, of the rest."""

    def qkv(self, x_NC: Tensor, ranks: TPGroup) -> tuple[Tensor, ...]:
        """Return queries, keys and values of this rank's heads, as `LayerBackend.qkv` returns them."""

    def finish(self, x_NC: Tensor, attn_out_NQ: Tensor, ranks: TPGroup) -> int:
        """Do what `LayerBackend.finish` does, from this rank's heads of attention and the other ranks' parts."""


class ModelShard(Protocol):
    """One rank's part of a model: ids count from its first token, and its logits cover its own tokens only."""

    width_independent: bool

    @property
    def blocks(self) -> Sequence[LayerShard]: ...

    def embed(self, ids_N: Tensor) -> Tensor: ...

    def head_rows(self, ids_N: Tensor) -> Tensor: ...

    def head(self, x_NC: Tensor) -> Tensor: ...


class Embedder(Protocol):
    """Source of the residual stream: the embedding of tokens."""

    def embed(self, ids_N: Tensor) -> Tensor:
        """Return the residual stream (N, C) before the first layer."""


class ModelBackend(Embedder, Protocol):
    """A decoder's weights, layer by layer, packed for products, and the passes through them."""

    width_independent: bool
    """With equal attention, a token's logits have the same bits however many tokens a pass has."""

    @property
    def blocks(self) -> Sequence[LayerBackend]: ...

    def head(self, x_NC: Tensor) -> Tensor:
        """Return the logits, float32 (N, V)."""

    def forward(self, ids_BT: Tensor, kv: KVBackend, batch: ForwardBatch, at_BJ: Tensor | None) -> ForwardOutput:
        """Run a pass of the whole model: `kv` stores its tokens, columns `at_BJ` are scored (None: all, J = T).

        Ids and columns are on the host. Raises CacheError where offloaded KV cannot be read.
        """


Forward = Callable[[ModelBackend, Tensor, KVBackend, ForwardBatch, Tensor | None], ForwardOutput]
"""Implementation of `ModelBackend.forward` for any model that has layers."""


SECTOR = 4096
"""Alignment in bytes of reads that bypass the system's page cache."""


class PageStore(Protocol):
    """Store of pages: an open file that is already unlinked, or memory."""

    bytes: int
    file: int
    direct: int
    """Second descriptor of the file, for reads that bypass the page cache; -1 where there is none, as of memory."""

    @property
    def memory(self) -> Tensor | None: ...

    @property
    def usage(self) -> tuple[int, int]:
        """Return the bytes of memory and of files."""


@dataclass(frozen=True, slots=True)
class OffloadLayout:
    """Sizes of offloaded KV memory. A page here is one of a single layer and KV head, keys and values."""

    store: PageStore
    page_bytes: int
    frames: int
    """Resident pages."""
    buffers: int
    buffer_frames: int
    """Pages of a buffer. Pages that are read ahead go through `buffers` buffers."""
    layers: int
    """Layers that are resident with all their pages."""
    moving: int
    """Most pages that are being written in a layer at once."""

    @property
    def memory(self) -> int:
        """Return the bytes of frames and buffers."""
        return (self.frames + self.buffers * self.buffer_frames) * self.page_bytes

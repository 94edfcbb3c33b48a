"""The contract of a set of kernels: models that run passes, and KV memory that they are handed.

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
"""Tokens per page of KV memory. Page 0 is scratch: padding is written there and nothing counts that is read from it."""


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE)


class Search(NamedTuple):
    """Search of row b's units [start[b], stop[b]): its queries need see only the nearest `picks[b]`.

    It may be an estimate that says which they are, and a memory may show all of them.
    """

    start: list[int]
    stop: list[int]
    picks: list[int]


@dataclass(frozen=True, slots=True)
class PageTable:
    """Keys that the queries of a pass see, row by row.

    Key i of row b lies at token `i % unit` of unit `units[b, i // unit]` of the memory (`units[b, g, ...]` where each
    KV head has its own list); a unit is a page, or an equal part of one. Query t of row b, of which there are
    `counts[b]`, is itself key `starts[b] + t` and sees those up to it. With a `window` it sees of these the first
    `sinks` and the last `window`.
    """

    units: Tensor
    """int32, (B, U) or (B, G, U); (layers, B, G, U) where each of several layers has its own."""
    starts: list[int]
    counts: list[int]
    unit: int = PAGE
    sinks: int = 0
    window: int = 0
    coarse: list[int] = field(default_factory=list)
    """A memory may read int8 copies, or half of int8 KV, for a row's keys below `coarse[b]`, all of them committed."""
    search: Search | None = None
    """What may be left out, all of it committed; for lists that all KV heads share, without a window."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One pass: each row's new tokens, of which the first stands at `positions[b]`, and what they see.

    `views` says so for all layers in order: for how many, and their lists. Token t of a row is key `starts[b] + t`
    of its lists, so they name its slot too. With a window a query meets the sinks from its place in [sinks | window].
    """

    positions: list[int]
    views: list[tuple[int, PageTable]]
    observe: bool = False
    """Whether rotated queries are returned, and with `return_mass`, if there is but one view, their attention mass."""
    return_mass: bool = False
    min_shape: tuple[int, int] = (1, 1)
    """Rows and tokens a row that a memory whose bits depend on the shape of a pass is to pad it to, at least."""
    exact: bool = False
    """Whether each row's keys before its own are committed: where some memory is offloaded, they may leave."""
    keep: int = 0
    """How many pages of most mass, of each row, layer and KV head, such memory has at hand from then on."""
    passing: bool = False
    """Whether such passes are only tried and may never come again, so that capturing one would not pay."""
    tables: list[list[int]] = field(default_factory=list)
    """Each row's pages in order, on the host; none where a memory that is offloaded will not be asked."""
    states: tuple[int, ...] = ()
    """The residual stream is returned as it is behind so many layers, for each of these; neither 0 nor all of them."""

    def lists(self) -> list[PageTable]:
        """Return the page table of each layer."""
        layer_tables: list[PageTable] = []
        for layers, lists in self.views:
            units_by_layer = lists.units if lists.units.ndim == 4 else [lists.units] * layers
            layer_tables += [replace(lists, units=units) for units in units_by_layer]
        return layer_tables


class ForwardOutput(NamedTuple):
    """Logits of a pass, float32 (B, J, V); if observed, rotated queries (L, B, T, H, D) and mass (L, B, G, U).

    The residual stream (S, B, T, C) behind each of `ForwardBatch.states`, if any; of padding it holds anything. And how
    many experts its first tokens, at most `SAMPLED`, have touched together, in the mean of the layers that have some.
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
    """K and V of every layer of a model, in pages. A slot is a token's place: page * PAGE + offset."""

    width_independent: bool
    """Whether a query's result has the same bits however many queries and rows a pass has."""
    searches: bool
    """Whether it leaves out what a search does not find, so that seeing much costs little."""

    def layer_attention(self, batch: ForwardBatch, width: int) -> LayerAttention:
        """Attention of a pass of `width` tokens a row, for models that run layer by layer; layers come in order."""

    def attend(self, layer: int, q_BTHD: Tensor, lists: PageTable) -> Tensor:
        """Attention of rotated queries alone: the mixed values (B, T, H, D)."""

    def write(self, layer: int, slots_N: Tensor, k_GND: Tensor, v_GND: Tensor) -> None:
        """Write rotated k and v to slots, rounded to the type that is kept."""

    def read(self, layer: int, slots_N: Tensor) -> KeysValues:
        """K and V of slots, each (G, N, D)."""

    def view(self, layer: int, first_slot: int, count: int) -> KeysValues:
        """K and V of consecutive slots, each (G, N, D); not to be written to, and without a copy where possible."""


class OffloadedKVBackend(KVBackend, Protocol):
    """KV memory whose pages lie in a store but for some. It raises CacheError, which costs what it was part of."""

    whole_layers: int
    """Number of layers that it has room to keep whole."""

    @property
    def bytes(self) -> KVMemoryUsage:
        """Bytes of each kind of memory."""

    def prefer(self, layers: Collection[int]) -> None:
        """Keep these layers whole before others."""

    def reserve(self, pages: Sequence[int]) -> None:
        """See that the store has room for pages that will be written."""

    def forget(self, pages: Sequence[int]) -> None:
        """Drop pages that nobody needs any more."""

    def commit(self, pages: Sequence[int]) -> None:
        """Pages are full of committed tokens: they may leave memory. Raises CacheError."""

    def read_prompt(self, model: ModelBackend, ids_1T: Tensor, batch: ForwardBatch) -> Generator[int, None, None]:
        """A pass over many tokens of one row, none of them scored, all through one layer before the next.

        So KV is stored once. Yields how many tokens its share of the work is worth. Raises CacheError.
        """


class LayerBackend(Protocol):
    """One layer of a decoder, but for its attention."""

    def qkv(self, x_NC: Tensor) -> tuple[Tensor, ...]:
        """Queries (N, H, D), keys and values (N, G, D), not yet rotated."""

    def finish(self, x_NC: Tensor, attn_out_NQ: Tensor) -> int:
        """Add the outputs of attention and MLP to the residual stream, in place.

        Returns how many experts the first tokens, at most `SAMPLED`, have touched together; 0 without experts.
        """


class LayerShard(Protocol):
    """Some heads of a layer, and some outputs of its other matrices; or some inputs of those that end its halves."""

    def qkv(self, x_NC: Tensor, ranks: TPGroup) -> tuple[Tensor, ...]:
        """Queries, keys and values of these heads, as a whole layer gives them."""

    def finish(self, x_NC: Tensor, attn_out_NQ: Tensor, ranks: TPGroup) -> int:
        """Do what `LayerBackend.finish` does, of the attention of these heads, with the other ranks' parts."""


class ModelShard(Protocol):
    """One rank's part of a model: ids are counted from its first token, and its logits are of its tokens only."""

    width_independent: bool

    @property
    def blocks(self) -> Sequence[LayerShard]: ...

    def embed(self, ids_N: Tensor) -> Tensor: ...

    def head_rows(self, ids_N: Tensor) -> Tensor: ...

    def head(self, x_NC: Tensor) -> Tensor: ...


class Embedder(Protocol):
    """Source of the residual stream: what tokens begin with."""

    def embed(self, ids_N: Tensor) -> Tensor:
        """The residual stream (N, C) at its start."""


class ModelBackend(Embedder, Protocol):
    """A decoder's weights, layer by layer, ready to be multiplied with, and what runs passes through them."""

    width_independent: bool
    """Whether a token's logits have the same bits however many tokens a pass has, given its attention."""

    @property
    def blocks(self) -> Sequence[LayerBackend]: ...

    def head(self, x_NC: Tensor) -> Tensor:
        """Logits, float32 (N, V)."""

    def forward(self, ids_BT: Tensor, kv: KVBackend, batch: ForwardBatch, at_BJ: Tensor | None) -> ForwardOutput:
        """A pass of the whole model: `kv` stores its tokens, and columns `at_BJ` are scored (None: all of them, J = T).

        Ids and columns are on the host. Raises CacheError where offloaded KV cannot be read.
        """


Forward = Callable[[ModelBackend, Tensor, KVBackend, ForwardBatch, Tensor | None], ForwardOutput]
"""`ModelBackend.forward` of any model that has layers."""


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

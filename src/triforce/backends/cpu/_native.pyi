"""CPU kernels. A row's result depends on that row alone, bit for bit.

Tensors must be contiguous, in CPU memory, and of the types and shapes told here (letters as in kernel_api.py):
ValueError otherwise. `dtype` is that of the weights or the pages, bfloat16 or float32. Results go into tensors of the
caller.
"""

from collections.abc import Sequence
from typing import Any, overload

from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
View = tuple[int, Tensor, Sequence[int], int, int, Sequence[int], tuple[Sequence[int], ...]]
"""Layers, pages as in `attend` or for each of the layers (layers, B, G, P), starts, sinks, window, coarse, search."""

def levels() -> list[str]: ...
def level() -> str: ...
def use(level: str) -> None: ...
def threads() -> int: ...
def set_threads(count: int) -> None: ...

class Matrix:
    """Weights (outputs, inputs) dtype; with `int8` rounded to that, and rows that they are multiplied with likewise."""

    def __init__(self, weight: Tensor, *, int8: bool = False) -> None: ...
    @property
    def bytes(self) -> int: ...
    def linear(self, x: Tensor, y: Tensor) -> None:
        """y = x W^T: x (rows, inputs) dtype, y (rows, outputs) float32."""

    def rows(self, ids: Tensor, out: Tensor) -> None:
        """Rows `ids` (N) int64 of the weight become out (N, inputs) float32."""

class Block:
    def __init__(
        self,
        input_norm: Tensor,
        q_proj: Tensor,
        k_proj: Tensor,
        v_proj: Tensor,
        o_proj: Tensor,
        post_norm: Tensor,
        gate_proj: Tensor,
        up_proj: Tensor,
        down_proj: Tensor,
        q_bias: Tensor | None,
        k_bias: Tensor | None,
        v_bias: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        *,
        head_dim: int,
        eps: float,
        int8: bool = False,
    ) -> None: ...
    @property
    def bytes(self) -> int: ...
    def qkv(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        """x (N, C) float32; q (N, H * D), k and v (N, G * D) float32, not rotated, are out."""

    def finish(self, x: Tensor, mixed: Tensor) -> None:
        """x (N, C) float32 gains what attention, `mixed` (N, H * D) dtype, and the MLP have to say."""

class Projections:
    """What a layer does before its attention, for some of its heads."""

    def __init__(
        self,
        input_norm: Tensor,
        q_proj: Tensor,
        k_proj: Tensor,
        v_proj: Tensor,
        q_bias: Tensor | None,
        k_bias: Tensor | None,
        v_bias: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        *,
        head_dim: int,
        eps: float,
        int8: bool = False,
    ) -> None: ...
    def qkv(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        """As a block's."""

class Gate:
    """The first half of an MLP, or some of its outputs."""

    def __init__(
        self, post_norm: Tensor, gate_proj: Tensor, up_proj: Tensor, *, eps: float, int8: bool = False
    ) -> None: ...
    @property
    def stride(self) -> int:
        """Outputs, up to a multiple of 16."""

    def run(self, x: Tensor, gated: Tensor) -> None:
        """gated (rows, stride) dtype becomes silu(gate) * up of the normed x (rows, hidden) float32."""

class Head:
    def __init__(self, norm: Tensor, matrix: Matrix, *, eps: float) -> None: ...
    def logits(self, x: Tensor, out: Tensor) -> None:
        """x (N, C) float32, out (N, V) float32."""

class Pages:
    """The K and V memory of one layer, each (G, pages, PAGE * D) dtype; it stays its owner's.

    So does the memory for sketches of keys that `turn` (D, D) float32 has turned, (G, pages, D + PAGE) bfloat16 and
    zero at first, and for int8 copies of the same shape with their scales (G, pages, 2) float32, if it is given.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        head_dim: int,
        turn: Tensor | None = None,
        sketches: Tensor | None = None,
        int8_keys: Tensor | None = None,
        int8_values: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> None: ...
    def write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        rotated: Tensor,
        positions_to_sinks: Tensor | None = None,
        q_sinks: Tensor | None = None,
    ) -> None:
        """Rotate q (N, H * D) and k to positions (N) int64 of the tables (S, D / 2); put k and v (N, G * D) into slots.

        slots (N) int64; rotated and q_sinks (N, H, D) are out.
        """

    def read(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Copy tokens out: k and v (N, G, D)."""

    def put(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Copy tokens in, keys rotated before: k and v (N, G, D)."""

    def attend(
        self,
        q: Tensor,
        starts: Sequence[int],
        counts: Sequence[int],
        lists: Tensor,
        mixed: Tensor,
        mass: Tensor | None = None,
        q_sinks: Tensor | None = None,
        sinks: int = 0,
        window: int = 0,
        coarse: Sequence[int] = (),
        search: tuple[Sequence[int], Sequence[int], Sequence[int]] = ...,
    ) -> None:
        """q (B, T, H, D), lists (B, P) or (B, G, P) int32, of pages; mixed (B, T, H, D), mass (B, G, P) are out.

        Keys of row b below coarse[b], in whole blocks of 64, are read from int8 copies of their pages. In a search
        (first, last, picks) queries see the picks[b] nearest ones of the pages [first[b], last[b]) of row b's list.
        """

class Decoder:
    """A whole model. The embedding (V, C), where it is not the head's matrix, stays its owner's."""

    def __init__(self, blocks: Sequence[Block], head: Head, embedding: Tensor | None) -> None: ...
    def run(
        self,
        memory: Sequence[Pages],
        ids: Tensor,
        positions: Sequence[int],
        counts: Sequence[int],
        cos: Tensor,
        sin: Tensor,
        views: Sequence[View],
        at: Tensor | None,
        logits: Tensor,
        queries: Tensor | None,
        mass: Tensor | None,
        first_layer: int = 0,
        last_layer: int = -1,
        x: Tensor | None = None,
        exact: bool = False,
        keep: int = 0,
    ) -> None:
        """A pass of ids (B, T) int64 over the pages of each layer, counts[b] tokens of row b from positions[b] on.

        Out: logits (B, J, V) of columns at (B, J) int64, rotated queries (L, B, T, H, D) dtype, mass (L, B, G, P).
        Some layers only: the residual stream stays in x (B, T, C) float32. For offloaded memory: keys before the starts
        are committed if `exact`, and the `keep` pages of most mass stay at hand.
        """

def burst(
    decoder: Decoder,
    memory: Sequence[Pages],
    positions: Sequence[int],
    cos: Tensor,
    sin: Tensor,
    view: View,
    texts: Array,
    lengths: Array,
    live: Array,
    sampler: Sampler,
    noise: Noise | Tensor,
    laws: Tensor,
    tokens: Array,
) -> tuple[int, float] | None:
    """tokens (B, K) behind each live row of texts (B, S) int64, one after another, and written there too.

    Row b has seen positions[b] tokens of its text; the view is what the first pass sees. Under `seeded` noise is the
    keys, under `rejection` uniforms (K, B), and laws (K, B, V) are those that tokens were drawn from. None, or row and
    largest logit of a token without a law.
    """

class OffloadError(RuntimeError): ...

class Store:
    """Where pages lie that memory has no room for: an open file of so many bytes, or memory (bytes) uint8."""

    @overload
    def __init__(self, file: int, direct: int, bytes: int) -> None: ...
    @overload
    def __init__(self, memory: Tensor) -> None: ...
    @property
    def bytes_read(self) -> int: ...
    def limit(self, bytes_per_second: float) -> None: ...

class Offload:
    """KV memory of all layers whose pages lie in a store, but for those in frames of the arena (bytes) uint8."""

    def __init__(
        self,
        arena: Tensor,
        is_bf16: bool,
        layers: int,
        heads: int,
        dim: int,
        pages: int,
        frames: int,
        buffers: int,
        buffer_frames: int,
        store: Store,
    ) -> None: ...
    def layer(self, i: int) -> Pages: ...
    def favour(self, layers: Sequence[bool]) -> None: ...
    def reserve(self, pages: Sequence[int]) -> None: ...
    def commit(self, layer: int, pages: Sequence[int]) -> None: ...
    def forget(self, pages: Sequence[int]) -> None: ...
    @property
    def seen(self) -> tuple[int, int, int]:
        """Pages of a head that were read ahead, read on demand, and kept as they came by."""

class LayeredPass:
    """A pass over some layers of an offloaded memory, between which something else is done; they come in their order.

    lists: of each layer its lists, int32 (B, U) or (B, G, U), and where rows start in them.
    """

    def __init__(
        self,
        memory: Offload,
        first: int,
        lists: Sequence[tuple[Tensor, Sequence[int]]],
        counts: Sequence[int],
        width: int,
        exact: bool,
        keep: int,
    ) -> None: ...
    def attend(self, layer: int, q: Tensor, mixed: Tensor, mass: Tensor | None = None) -> None:
        """The next layer: q and mixed (B, T, H, D), mass (B, G, U)."""

def best(scores: Tensor, start: int, stop: int, ids: Tensor) -> None:
    """Where the highest of scores (G, N) in [start, stop) are: ids (G, picks) int64, ascending; the first of equals."""

class Noise:
    def __init__(self, seeds: Sequence[int], choices: Sequence[int]) -> None: ...
    def uniforms(self, draws: Tensor, tier: int, used: Array, out: Tensor) -> None:
        """out (B, n) float64: the next uniforms of each row for a tier; draws (tiers, B) int64 moves on by used (B)."""

class Sampler:
    def __init__(self, vocabulary: int) -> None: ...
    def add(
        self,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition: float,
        presence: float,
        frequency: float,
        bias: Sequence[tuple[int, float]],
        prompt: int,
        /,
    ) -> None: ...
    def seeded(
        self,
        logits: Tensor,
        ids: Array,
        lengths: Array,
        live: Array,
        tokens: Array,
        laws: Tensor,
        origins: Array,
        counts: Array,
        out_tokens: Array,
        out_laws: Tensor,
        out_origins: Array,
        out_counts: Array,
        tier: int,
        noise: Noise | Tensor,
        /,
    ) -> tuple[int, int, float] | None:
        """None, or row, column and largest logit of a column without a law."""

    def rejection(
        self,
        logits: Tensor,
        ids: Array,
        lengths: Array,
        live: Array,
        tokens: Array,
        laws: Tensor,
        origins: Array,
        counts: Array,
        out_tokens: Array,
        out_laws: Tensor,
        out_origins: Array,
        out_counts: Array,
        tier: int,
        noise: Tensor,
        /,
    ) -> tuple[int, int, float] | None: ...

def read(words: Tensor) -> int:
    """Reads words (N) int64 as fast as the memory gives them; their exclusive or."""

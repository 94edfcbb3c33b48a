"""KV memory in the layout of the native kernels. A page has the keys and values of 16 tokens of one KV head.

Keys are in pairs of channels, values in pairs of tokens (see csrc/pages.hpp).

With `int8` each page has room for an int8 copy: codes from -127 to 127, with one scale for the page's keys and one for
its values. Keys below `PageTable.low_precision_ends` are read from the copy, in whole blocks of 64. The copy is made
when it is first read, and dropped when the page is written to, so it is valid for committed keys. Sketches of keys,
which a search reads, are made and dropped in the same way; a sketch takes D + 16 bfloat16 numbers beside the 32 * D of
the page.

KV of a model with `kv_int8` is int8 itself, in pages of codes and scales. Such KV has no copies: keys below
`low_precision_ends` are read from their upper nibbles, which are contiguous in a page. Suffix D of a tensor of its rows
stands for R, the D + 2 bytes of a row (see `kv_rows`).

Shape suffixes as in kernel_api.py; L layers, P pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triforce.arrays import HOST_TYPES, Array, DType, rounded, to_host
from triforce.backends.cpu import _native
from triforce.backends.kernel_api import PAGE, ForwardBatch, LayerAttention, PageTable, Search
from triforce.backends.kv_memory import in_order, kv_memory_error, slots_of
from triforce.errors import CacheError
from triforce.model.config import ModelConfig
from triforce.model.kv_rows import kv_dtype, numbers
from triforce.model.rope import Rope
from triforce.ragged import columns, ints

NO_SEARCH = Search([], [], [])
AttendRotated = Callable[[int, Array, Array | None], tuple[Array, Array]]
"""Attention of one pass: takes a layer, its rotated queries, and the queries for the sinks or None."""


class NativeKV:
    xp = np
    device = "cpu"
    width_independent = True
    searches = True

    def __init__(
        self, config: ModelConfig, pages: int, dtype: DType, int8: bool = False, window_pages: int = 0
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.int8 = int8
        self.native_pages = self._of_layers(window_pages, partial(self._in_memory, pages=pages))
        """Pages of each layer. Layers with a window may have separate pages, `window_pages` of them."""

    def _of_layers(
        self, window_pages: int, make_full_pages: Callable[[list[int]], list[_native.Pages]]
    ) -> list[_native.Pages]:
        """Return the pages of each layer. make_full_pages: allocates pages of layers without window pages."""
        windowed = [bool(window and window_pages) for window in self.config.windows]
        full_layers, windowed_layers = (
            [i for i, has_window in enumerate(windowed) if has_window == kind] for kind in (False, True)
        )
        return in_order(windowed, make_full_pages(full_layers), self._in_memory(windowed_layers, window_pages))

    def _in_memory(self, layers: list[int], pages: int) -> list[_native.Pages]:
        """Allocate `pages` pages in memory for each of `layers`."""
        config = self.config
        page_options = dict[str, Any](head_dim=self.config.head_dim)
        if not (config.kv_int8 and config.hadamard):
            page_options["rotation"] = random_rotation(config.head_dim)
        if config.architecture.score_cap:
            page_options["score_cap"] = config.architecture.score_cap
        if config.kv_int8:
            page_options |= {"is_bf16": self.dtype == "bfloat16", "hadamard": config.hadamard}
        memory = self._allocated(len(layers), pages)
        if config.attention_sink_logits_LH is not None:
            for layer, parts in zip(layers, memory, strict=True):
                parts["attention_sink_logits"] = config.attention_sink_logits_LH[layer]
        return [_native.Pages(**parts, **page_options) for parts in memory]

    def _allocated(self, layers: int, pages: int) -> list[dict[str, Any]]:
        """Allocate memory of `layers` layers with `pages` pages each: per layer, tensors by name."""
        config = self.config
        heads = (layers, self.config.kv_heads, pages + 1)
        memory = dict[str, Array]()
        shape = (*heads, PAGE * config.head_dim)
        if config.kv_int8:
            memory["codes"] = allocate((*heads, 2 * PAGE * config.row_size), np.int8)
        else:
            memory |= {name: allocate(shape, HOST_TYPES[self.dtype]) for name in ("keys", "values")}
            if self.int8:
                memory |= {name: allocate(shape, np.int8) for name in ("int8_keys", "int8_values")}
                memory["scales"] = np.empty((*heads, 2), np.float32)
        # numpy's zeros take no memory until they are written to.
        memory["sketches"] = np.zeros((*heads, config.head_dim + PAGE), HOST_TYPES["bfloat16"])
        return [{name: part[layer] for name, part in memory.items()} for layer in range(layers)]

    def array(self, source: Array) -> Array:
        return to_host(source)

    def numbers(self, rows_R: Array) -> Array:
        return numbers(rows_R)

    def empty(self, shape: tuple[int, ...]) -> Array:
        return allocate(shape, HOST_TYPES[self.dtype])

    def layer_attention(self, batch: ForwardBatch, width: int) -> LayerAttention:
        return self.attention_from(batch, width, 0)

    def attention_from(self, batch: ForwardBatch, width: int, first_layer: int) -> LayerAttention:
        """Return the attention of `layer_attention`, for a batch whose views start at layer `first_layer`.

        A row's bits equal those of a pass in one native call (`tests/backends/cpu/test_decoder.py`).
        """
        tables_L = batch.layer_tables()
        B = len(batch.positions)
        page_table = tables_L[0]
        (cos, sin) = rotations(self.config.rope, batch, width)
        positions_N = columns(ints(batch.positions), width).flatten()
        to_sinks_N = np.minimum(positions_N, page_table.sinks + page_table.window - 1)
        slots_L = slots_of(self.config, tables_L, width, first_layer)
        attend = self.attend_of(batch, width, first_layer)
        rotations_L = self.config.rotations

        def attention(layer: int, q_BTHD: Array, k_BTGD: Array, v_BTGD: Array) -> tuple[Array, Array, Array]:
            rotated_BTHD = np.empty((B, width, self.config.heads, self.config.head_dim), HOST_TYPES[self.dtype])
            q_sinks_BTHD = np.empty_like(rotated_BTHD) if page_table.sinks and page_table.window else None
            q_NQ, k_NP, v_NP = (x.reshape(B * width, -1) for x in (q_BTHD, k_BTGD, v_BTGD))
            self.native_pages[layer].rope_and_write(
                q=q_NQ, k=k_NP, v=v_NP, cos=cos, sin=sin, positions=positions_N, slots=slots_L[layer - first_layer],
                rotated=_by_token(rotated_BTHD), sink_positions=None if q_sinks_BTHD is None else to_sinks_N,
                q_sinks=None if q_sinks_BTHD is None else _by_token(q_sinks_BTHD), rotation=rotations_L[layer],
            )  # fmt: skip
            return rotated_BTHD, *attend(layer, rotated_BTHD, q_sinks_BTHD)

        return attention

    def attend_of(self, batch: ForwardBatch, width: int, first_layer: int) -> AttendRotated:
        """Return the attention of a pass's layers, from `first_layer` on, to rotated queries."""
        tables_L = batch.layer_tables()
        return lambda layer, q_BTHD, q_sinks_BTHD: self._attend(
            layer, q_BTHD, q_sinks_BTHD, tables_L[layer - first_layer], batch.return_mass
        )

    def attend(self, layer: int, q_BTHD: Array, page_table: PageTable) -> Array:
        return self._attend(layer, q_BTHD, None, page_table, False)[0]

    def _attend(
        self, layer: int, q_BTHD: Array, q_sinks_BTHD: Array | None, page_table: PageTable, return_mass: bool
    ) -> tuple[Array, Array]:
        attn_out_BTHD = np.empty_like(q_BTHD)
        shape = (len(q_BTHD), self.config.kv_heads, page_table.units.shape[-1])
        mass_BGU = np.empty(shape, np.float32) if return_mass else None
        self.native_pages[layer].attend(
            q_BTHD, page_table.starts, page_table.counts, page_table.units, attn_out_BTHD, mass_BGU,
            q_sinks=q_sinks_BTHD, sinks=page_table.sinks, window=page_table.window,
            coarse=page_table.low_precision_ends if self.int8 else [], search=self._search(page_table),
        )  # fmt: skip
        return attn_out_BTHD, mass_BGU if mass_BGU is not None else np.empty(0, np.float32)

    def _search(self, page_table: PageTable) -> Search:
        return page_table.search if page_table.search and self.searches else NO_SEARCH

    def write(self, layer: int, slots_N: Array, k_GND: Array, v_GND: Array) -> None:
        row_dtype = kv_dtype(self.config, self.dtype)
        k_NGD, v_NGD = (np.ascontiguousarray(rounded(x, row_dtype).swapaxes(0, 1)) for x in (k_GND, v_GND))
        self.native_pages[layer].write(slots_N, k_NGD, v_NGD)

    def read(self, layer: int, slots_N: Array) -> tuple[Array, Array]:
        shape = (len(slots_N), self.config.kv_heads, self.config.row_size)
        k_NGD, v_NGD = (np.empty(shape, HOST_TYPES[kv_dtype(self.config, self.dtype)]) for _ in range(2))
        self.native_pages[layer].read(slots_N, k_NGD, v_NGD)
        return k_NGD.swapaxes(0, 1), v_NGD.swapaxes(0, 1)

    def view(self, layer: int, first_slot: int, count: int) -> tuple[Array, Array]:
        return self.read(layer, np.arange(first_slot, first_slot + count))


def allocate(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Allocate keys or values of this shape. Raises CacheError with the bytes of both if memory is short."""
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:  # ValueError: more bytes than an address counts
        raise kv_memory_error(2 * prod(shape) * np.dtype(dtype).itemsize) from error


def _by_token(x_BTHD: Array) -> Array:
    """Return (N, H, D), a view."""
    return x_BTHD.reshape(-1, *x_BTHD.shape[2:])


def rotations(rope: Rope, batch: ForwardBatch, T: int) -> tuple[Array, Array]:
    """Return the cos and sin tables that a pass of `T` columns looks up.

    The tables are filled for position 0, which padding has, and for the rows' positions. If the text is longer than
    sinks and window, the last position of [sinks | window] is filled too: queries for the sinks are rotated to it.
    """
    page_table = batch.views[0][1]
    reach = max(batch.positions) + T
    end = page_table.sinks + page_table.window - 1
    return rope.tables((0, *([end] if 0 < end < reach else []), *batch.positions), T)


@contextmanager
def offload_errors() -> Iterator[None]:
    """Raise CacheError where the store fails in this context."""
    try:
        yield
    except _native.OffloadError as error:
        raise CacheError(str(error)) from error


@cache
def random_rotation(dim: int) -> NDArray[np.float32]:
    """Return a random orthogonal matrix (D, D): rotated vectors have no channel much larger than the others.

    Its normal numbers are those of `torch.randn` with the seed 0 (the method of Box and Muller 1958, on uniform numbers
    of the Mersenne Twister in blocks of 16), so searches find the same pages on every machine and with every release.
    """
    words = np.random.RandomState(0).randint(0, 2**32, (-(-dim * dim // 16), 2, 8), np.uint32)
    uniforms = (words % 2**24) / 2**24
    radius = np.sqrt(-2 * np.log(1 - uniforms[:, 0]))
    angle = 2 * np.pi * uniforms[:, 1]
    normals = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    matrix = np.linalg.qr(normals.ravel()[: dim * dim].reshape(dim, dim))[0]
    return np.ascontiguousarray(matrix, np.float32)

"""KV memory in the layout of the native kernels: a page holds pairs of features of its keys, and pairs of its values.

With `int8` each page has room for a copy: codes from -127 to 127, with one scale for a KV head's keys and one for its
values. Keys that a list calls `coarse` are read from the copy, in whole blocks of 64. The copy is made when it is first
read, and dropped when the page is written to, so it is valid for committed keys. The sketches of keys that a search
reads are made and dropped likewise; they take a 25th of bfloat16 KV where they are used.

KV of a model with `kv_int8` is int8 itself, in pages of codes and scales; D of its rows is that of `kv_rows`. Such KV
has no copies: `coarse` keys are read from the upper nibbles, which are contiguous in a page.

Shape suffixes as in kernel_api.py; L layers, P pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triforce.backends.cpu import _native
from triforce.backends.kernel_api import PAGE, ForwardBatch, LayerAttention, PageTable, Search
from triforce.backends.kv_rows import kv_dtype
from triforce.backends.torch.kv import allocate, in_order, slots_of
from triforce.errors import CacheError
from triforce.model.config import ModelConfig
from triforce.model.rope import Rope
from triforce.ragged import columns, ints

NO_SEARCH = Search([], [], [])
AttendRotated = Callable[[int, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""Attention of one pass: takes a layer, its rotated queries, and the queries for the sinks or None."""


class NativeKV:
    width_independent = True
    searches = True

    def __init__(
        self, config: ModelConfig, pages: int, dtype: torch.dtype, int8: bool = False, window_pages: int = 0
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
            page_options |= {"is_bf16": self.dtype == torch.bfloat16, "hadamard": config.hadamard}
        memory = self._allocated(len(layers), pages)
        if config.attention_sink_logits_LH is not None:
            for layer, parts in zip(layers, memory, strict=True):
                parts["attention_sink_logits"] = config.attention_sink_logits_LH[layer]
        return [_native.Pages(**parts, **page_options) for parts in memory]

    def _allocated(self, layers: int, pages: int) -> list[dict[str, Any]]:
        """Allocate memory of `layers` layers with `pages` pages each: per layer, tensors by name."""
        config = self.config
        heads = (layers, self.config.kv_heads, pages + 1)
        memory = dict[str, Tensor]()
        shape = (*heads, PAGE * config.head_dim)
        if config.kv_int8:
            memory["codes"] = allocate((*heads, 2 * PAGE * config.row_size), torch.int8, "cpu")
        else:
            memory |= {name: allocate(shape, self.dtype, "cpu") for name in ("keys", "values")}
            if self.int8:
                memory |= {name: allocate(shape, torch.int8, "cpu") for name in ("int8_keys", "int8_values")}
                memory["scales"] = torch.empty(*heads, 2)
        # numpy's zeros take no memory until they are written to.
        sketches = torch.from_numpy(np.zeros((*heads, config.head_dim + PAGE), np.int16)).view(torch.bfloat16)
        memory["sketches"] = sketches
        return [{name: part[layer] for name, part in memory.items()} for layer in range(layers)]

    def layer_attention(self, batch: ForwardBatch, width: int) -> LayerAttention:
        return self.attention_from(batch, width, 0)

    def attention_from(self, batch: ForwardBatch, width: int, first_layer: int) -> LayerAttention:
        """Return what `layer_attention` does, for a batch whose views start at layer `first_layer`.

        Each kernel gives a row the bits of a pass in one call (`tests/backends/cpu/test_decoder.py`).
        """
        lists_L = batch.lists()
        B = len(batch.positions)
        lists = lists_L[0]
        (cos, sin) = rotations(self.config.rope, batch, width)
        positions_N = torch.from_numpy(columns(ints(batch.positions), width).flatten())
        to_sinks_N = positions_N.clamp_max(lists.sinks + lists.window - 1)
        slots_L = slots_of(self.config, lists_L, width, first_layer)
        attend = self.attend_of(batch, width, first_layer)
        rotations_L = self.config.rotations

        def attention(layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            rotated_BTHD = torch.empty(B, width, self.config.heads, self.config.head_dim, dtype=self.dtype)
            q_sinks_BTHD = torch.empty_like(rotated_BTHD) if lists.sinks and lists.window else None
            q_NQ, k_NP, v_NP = (x.flatten(2).flatten(0, 1) for x in (q_BTHD, k_BTGD, v_BTGD))
            self.native_pages[layer].rope_and_write(
                q=q_NQ, k=k_NP, v=v_NP, cos=cos, sin=sin, positions=positions_N, slots=slots_L[layer - first_layer],
                rotated=rotated_BTHD.flatten(0, 1), sink_positions=None if q_sinks_BTHD is None else to_sinks_N,
                q_sinks=None if q_sinks_BTHD is None else q_sinks_BTHD.flatten(0, 1), rotation=rotations_L[layer],
            )  # fmt: skip
            return rotated_BTHD, *attend(layer, rotated_BTHD, q_sinks_BTHD)

        return attention

    def attend_of(self, batch: ForwardBatch, width: int, first_layer: int) -> AttendRotated:
        """Return the attention of a pass's layers, from `first_layer` on, to rotated queries."""
        lists_L = batch.lists()
        return lambda layer, q_BTHD, q_sinks_BTHD: self._attend(
            layer, q_BTHD, q_sinks_BTHD, lists_L[layer - first_layer], batch.return_mass
        )

    def attend(self, layer: int, q_BTHD: Tensor, lists: PageTable) -> Tensor:
        return self._attend(layer, q_BTHD, None, lists, False)[0]

    def _attend(
        self, layer: int, q_BTHD: Tensor, q_sinks_BTHD: Tensor | None, lists: PageTable, return_mass: bool
    ) -> tuple[Tensor, Tensor]:
        attn_out_BTHD = torch.empty_like(q_BTHD)
        shape = (len(q_BTHD), self.config.kv_heads, lists.units.shape[-1])
        mass_BGU = torch.empty(shape) if return_mass else None
        self.native_pages[layer].attend(
            q_BTHD, lists.starts, lists.counts, lists.units, attn_out_BTHD, mass_BGU, q_sinks=q_sinks_BTHD,
            sinks=lists.sinks, window=lists.window, coarse=lists.coarse if self.int8 else [],
            search=self._search(lists),
        )  # fmt: skip
        return attn_out_BTHD, mass_BGU if mass_BGU is not None else q_BTHD.new_empty(0)

    def _search(self, lists: PageTable) -> Search:
        return lists.search if lists.search and self.searches else NO_SEARCH

    def write(self, layer: int, slots_N: Tensor, k_GND: Tensor, v_GND: Tensor) -> None:
        rows = kv_dtype(self.config, self.dtype)
        k_NGD, v_NGD = (x.transpose(0, 1).to(rows).contiguous() for x in (k_GND, v_GND))
        self.native_pages[layer].write(slots_N, k_NGD, v_NGD)

    def read(self, layer: int, slots_N: Tensor) -> tuple[Tensor, Tensor]:
        shape = (len(slots_N), self.config.kv_heads, self.config.row_size)
        k_NGD, v_NGD = (torch.empty(shape, dtype=kv_dtype(self.config, self.dtype)) for _ in range(2))
        self.native_pages[layer].read(slots_N, k_NGD, v_NGD)
        return k_NGD.transpose(0, 1), v_NGD.transpose(0, 1)

    def view(self, layer: int, first_slot: int, count: int) -> tuple[Tensor, Tensor]:
        return self.read(layer, torch.arange(first_slot, first_slot + count))


def rotations(rope: Rope, batch: ForwardBatch, T: int) -> tuple[Tensor, Tensor]:
    """Return the cos and sin tables that a pass of `T` columns looks up.

    Filled are position 0 for padding, the window's end, from which queries meet the sinks, where the text is longer
    (windows may have any size), and the rows' positions.
    """
    lists = batch.views[0][1]
    reach = max(batch.positions) + T
    end = lists.sinks + lists.window - 1
    return rope.tables((0, *([end] if 0 < end < reach else []), *batch.positions), T)


@contextmanager
def offload_errors() -> Iterator[None]:
    """Raise CacheError where the store fails in this context."""
    try:
        yield
    except _native.OffloadError as error:
        raise CacheError(str(error)) from error


@cache
def random_rotation(dim: int) -> Tensor:
    """Return a random orthogonal matrix (D, D): rotated vectors have no channel much larger than the others."""
    matrix: Tensor = torch.linalg.qr(torch.randn(dim, dim, generator=torch.Generator().manual_seed(0)))[0]
    return matrix.contiguous()

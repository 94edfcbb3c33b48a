"""KV memory in the layout of the native kernels: a page holds pairs of features of its keys, and pairs of its values.

With `int8` there is room for a copy of each page in which a KV head's keys are multiples of one scale, from -127 to
127 of it, and its values those of another. Lists that are `coarse` read it instead, in whole blocks of 64 keys. It is
made when it is first read, and dropped when the page is written to: so it is right for keys that are committed. The
same holds of the sketches of keys that a search reads, a 25th of the memory where it is used.

Shape suffixes as in kernel_api.py; L layers, P pages.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triforce.backends.cpu import _native
from triforce.backends.cpu.layerwise import Mix, by_layers, rotations
from triforce.backends.cpu.model import NativeModel
from triforce.backends.kernel_api import PAGE, ForwardBatch, ForwardOutput, ModelBackend, PageTable, Search
from triforce.backends.torch.kv import allocate
from triforce.model.config import ModelConfig
from triforce.ragged import Bools, Ints

Draws = tuple[_native.Sampler, "_native.Noise | Tensor", Tensor]
NOTHING = Search([], [], [])


class NativeKV:
    width_independent = True
    searches = True

    def __init__(self, config: ModelConfig, pages: int, dtype: torch.dtype, int8: bool = False) -> None:
        self.config, self.dtype, self.int8 = config, dtype, int8
        shape = (config.layers, config.kv_heads, pages + 1, PAGE * config.head_dim)
        keys, values = (allocate(shape, dtype, "cpu") for _ in range(2))
        # numpy's zeros take no memory until they are written to.
        sketches = torch.from_numpy(np.zeros((*shape[:3], config.head_dim + PAGE), np.int16)).view(torch.bfloat16)
        copies: list[Tensor] = []
        if int8:
            copies = [*(allocate(shape, torch.int8, "cpu") for _ in range(2)), torch.empty(*shape[:3], 2)]
        self._layers = [
            _native.Pages(
                keys[layer], values[layer], config.head_dim, turn(config.head_dim), sketches[layer],
                *(copy[layer] for copy in copies),
            )
            for layer in range(config.layers)
        ]  # fmt: skip

    def forward(self, model: ModelBackend, ids_BT: Tensor, at_BJ: Tensor | None, this: ForwardBatch) -> ForwardOutput:
        if not isinstance(model, NativeModel):  # ranks that share a model talk between its layers
            return by_layers(self, model, ids_BT, at_BJ, this)
        (B, T), config = ids_BT.shape, self.config
        logits_BJV = torch.empty(B, T if at_BJ is None else at_BJ.shape[1], config.vocab_size)
        queries_LBTHD = mass_LBGU = None
        if this.observe:
            queries_LBTHD = torch.empty(config.layers, B, T, config.heads, config.head_dim, dtype=self.dtype)
        if this.weigh:
            mass_LBGU = torch.empty(config.layers, B, config.kv_heads, this.views[0][1].units.shape[-1])
        model.decoder.run(
            self._layers, ids_BT.contiguous(), this.positions, this.views[0][1].counts,
            *rotations(config.rope, this, T), [self._view(*view) for view in this.views],
            at_BJ, logits_BJV, queries_LBTHD, mass_LBGU, exact=this.exact, keep=this.keep,
        )  # fmt: skip
        return ForwardOutput(logits_BJV, queries_LBTHD, mass_LBGU)

    def burst(
        self, model: NativeModel, this: ForwardBatch, texts: tuple[Ints, Ints, Bools], draws: Draws, tokens_BK: Ints
    ) -> tuple[int, float] | None:
        """K tokens behind each text, one after another in one call, as so many passes and draws would give them.

        this: what the first pass sees, from which the others go on. texts: ids (B, S) with room for the tokens, which
        are written there too, lengths, and which rows are live. draws: sampler, noise, and where laws go, as in
        `_native.burst`. Answers the row and its largest logit where a token has no law.
        """
        (view,), (sampler, noise, laws), (ids_BS, lengths_B, live_B) = this.views, draws, texts
        longest = int((lengths_B - np.array(this.positions)).max()) + tokens_BK.shape[1]
        return _native.burst(
            model.decoder, self._layers, this.positions, *rotations(self.config.rope, this, longest), self._view(*view),
            ids_BS, lengths_B, live_B, sampler, noise, laws, tokens_BK,
        )  # fmt: skip

    def _view(self, layers: int, lists: PageTable) -> _native.View:
        coarse = lists.coarse if self.int8 else []
        return layers, lists.units, lists.starts, lists.sinks, lists.window, coarse, self._search(lists)

    def attend(
        self, layer: int, q_BTHD: Tensor, lists: PageTable, weigh: bool = False, q_sinks_BTHD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        mixed_BTHD = torch.empty_like(q_BTHD)
        shape = (len(q_BTHD), self.config.kv_heads, lists.units.shape[-1])
        mass_BGU = torch.empty(shape) if weigh else None
        self._layers[layer].attend(
            q_BTHD, lists.starts, lists.counts, lists.units, mixed_BTHD, mass_BGU, q_sinks_BTHD,
            lists.sinks, lists.window, lists.coarse if self.int8 else [], self._search(lists),
        )  # fmt: skip
        return mixed_BTHD, mass_BGU if mass_BGU is not None else q_BTHD.new_empty(0)

    def mixing(self, width: int, this: ForwardBatch, first: int) -> Mix:
        """How the layers of a pass attend, from `first` on, if it goes layer by layer."""
        lists_L = this.lists()
        return lambda layer, q_BTHD, q_sinks_BTHD: self.attend(
            layer, q_BTHD, lists_L[layer - first], this.weigh, q_sinks_BTHD
        )

    def _search(self, lists: PageTable) -> Search:
        return lists.search if lists.search and self.searches else NOTHING

    def write(self, layer: int, *arguments: Any) -> None:
        self._layers[layer].write(*arguments)

    def put(self, layer: int, slots_N: Tensor, k_GND: Tensor, v_GND: Tensor) -> None:
        k_NGD, v_NGD = (x.transpose(0, 1).to(self.dtype).contiguous() for x in (k_GND, v_GND))
        self._layers[layer].put(slots_N, k_NGD, v_NGD)

    def get(self, layer: int, slots_N: Tensor) -> tuple[Tensor, Tensor]:
        shape = (len(slots_N), self.config.kv_heads, self.config.head_dim)
        k_NGD, v_NGD = (torch.empty(shape, dtype=self.dtype) for _ in range(2))
        self._layers[layer].read(slots_N, k_NGD, v_NGD)
        return k_NGD.transpose(0, 1), v_NGD.transpose(0, 1)

    def run(self, layer: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        return self.get(layer, torch.arange(first, first + count))


@cache
def turn(dim: int) -> Tensor:
    """An orthogonal matrix (D, D), drawn at random: what it turns has no channel larger than the others."""
    matrix: Tensor = torch.linalg.qr(torch.randn(dim, dim, generator=torch.Generator().manual_seed(0)))[0]
    return matrix.contiguous()

"""A prompt read layer by layer, all of its tokens through one before the next: so offloaded KV is stored once.

Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from triforce.backends.cpu import _native
from triforce.backends.cpu.kv import rotations
from triforce.backends.cpu.model import NativeModel
from triforce.backends.cpu.offload import NativeOffloadedKV, offload_errors
from triforce.backends.kernel_api import PAGE, ForwardBatch, LayeredModel

AT_ONCE = 512
"""Tokens of a prompt that go through a layer together: their activations stay in the caches."""


def read_prompt(model: LayeredModel, ids_1T: Tensor, kv: NativeOffloadedKV, batch: ForwardBatch) -> Iterator[int]:
    """A pass over many tokens of one row, none of them scored; yields how many its share of the work is worth."""
    config, T, ((_, lists),) = kv.config, ids_1T.shape[1], batch.views
    x_1TC = torch.empty(1, T, config.hidden_size)
    ends = (lists.starts[0] // PAGE, (lists.starts[0] + T) // PAGE)
    full: list[int] = lists.units[0, ends[0] : ends[1]].tolist()
    for layer in range(config.layers):
        for first in range(0, T, AT_ONCE):
            part = slice(first, min(first + AT_ONCE, T))
            seen = replace(lists, starts=[lists.starts[0] + first], counts=[part.stop - first])
            here = ForwardBatch([batch.positions[0] + first], [(config.layers, seen)], exact=True)
            with offload_errors():
                _through_layer(model, layer, ids_1T[:, part].contiguous(), x_1TC[:, part], kv, here)
            if part.stop == T:
                with offload_errors():
                    kv.native_offload.commit(layer, full)
            yield (layer * T + part.stop) // config.layers


def _through_layer(
    model: LayeredModel, layer: int, ids_1T: Tensor, x_1TC: Tensor, kv: NativeOffloadedKV, batch: ForwardBatch
) -> None:
    T, ((layers, lists),) = ids_1T.shape[1], batch.views
    if not isinstance(model, NativeModel):  # ranks that share a model talk between its layers
        return one_layer(model, layer, ids_1T, x_1TC, kv, replace(batch, views=[(1, lists)]))
    nothing, logits = torch.empty(1, 0, dtype=torch.long), torch.empty(1, 0, kv.config.vocab_size)
    cos, sin = rotations(kv.config.rope, batch, T)
    model.decoder.forward(
        memory=kv.native_pages, ids=ids_1T, positions=batch.positions, counts=lists.counts, cos=cos, sin=sin,
        views=[_native.View(layers=layers, lists=lists.units, starts=lists.starts)], at=nothing, logits=logits,
        first_layer=layer, last_layer=layer + 1, x=x_1TC, exact=True,
    )  # fmt: skip


def one_layer(
    model: LayeredModel, layer: int, ids_1T: Tensor, x_1TC: Tensor, kv: NativeOffloadedKV, batch: ForwardBatch
) -> None:
    """The residual stream of some tokens goes through a layer; into the first one it comes from their ids."""
    if layer == 0:
        x_1TC[0] = model.embed(ids_1T[0])
    block, x_TC = model.blocks[layer], x_1TC[0]
    attention = kv.attention_from(batch, len(x_TC), layer)
    _, attn_out_1THD, _ = attention(layer, *(each[None] for each in block.qkv(x_TC)))
    block.finish(x_TC, attn_out_1THD[0].flatten(1))

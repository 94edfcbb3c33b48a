"""A prompt read layer by layer, all of its tokens through one before the next: so KV leaves the device once.

Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from triforce.backends.cuda.kv import write_and_attend
from triforce.backends.cuda.offload.kv import TritonOffloadedKV
from triforce.backends.cuda.offload.layout import runs_of
from triforce.backends.cuda.triton.attention import DevicePageTable
from triforce.backends.cuda.triton.page_copy import KeysValues
from triforce.backends.kernel_api import PAGE, ForwardBatch, LayerBackend, LayeredModel, PageTable, Rotation, pages_for
from triforce.backends.torch.kv import WIDE

AT_ONCE = 8192
"""Tokens that go through a layer together, counted from the text's start."""


def read_prompt(model: LayeredModel, ids_1T: Tensor, kv: TritonOffloadedKV, batch: ForwardBatch) -> Iterator[int]:
    """A pass over many tokens of one row, none of them scored; yields how many its share of the work is worth.

    It yields behind each layer: between two of them the buffers are others'.
    """
    manager = kv.manager
    (start,), (table,), T, device = batch.positions, batch.tables, ids_1T.shape[1], manager.device
    earlier, new = runs_of(sorted(table[: pages_for(start)])), table[start // PAGE : pages_for(start + T)]
    manager.store([*manager.seats.leaving(table, start), *manager.seats.fresh(new[:1])])
    manager.leave(new)
    leaving, x_TC = runs_of(sorted(new)), model.embed(ids_1T.flatten().to(device))
    ends = [*range((start // AT_ONCE + 1) * AT_ONCE, start + T, AT_ONCE), start + T]
    places, stream, units_1U = manager.places, manager.stream, batch.views[0][1].units
    try:
        for layer, block in enumerate(model.blocks):
            whole = layer in places.home
            if not whole:
                stream.after(stream.computed())
                buffer = manager.buffers.fill(partial(places.copies_in, layer, earlier))
                manager.buffers.use(buffer)
            home = places.home[layer] if whole else buffer
            for at, end in zip([start, *ends], ends, strict=False):
                x_NC, last = x_TC[at - start : end - start], layer + 1 == len(model.blocks)
                _through(block, x_NC, at, units_1U, kv.tables_PF, places.of_home(home), last)
            if not whole:
                manager.buffers.leave(home, places.copies_out(layer, leaving, home))
            yield (layer + 1) * T // len(model.blocks)
        manager.seats.store(new)
    finally:
        stream.hold(stream.reached())


def _through(
    block: LayerBackend, x_NC: Tensor, at: int, units_1U: Tensor, tables_PF: Rotation, kv: KeysValues, last: bool
) -> None:
    """Tokens from `at` on through one layer; behind the last one nobody asks for what they come to."""
    count = len(x_NC)
    q_1NHD, k_1NGD, v_1NGD = (x.view(1, *x.shape) for x in block.qkv(x_NC))
    at_1, count_1 = (torch.tensor([n], device=x_NC.device) for n in (at, count))
    wide = PageTable(units_1U, [at], [count]) if count > WIDE else None
    _, attn_out_1NHD, _ = write_and_attend(
        (q_1NHD, k_1NGD, v_1NGD), at_1, tables_PF, DevicePageTable(units_1U, at_1, count_1, PAGE), kv, wide
    )
    if not last:
        block.finish(x_NC, attn_out_1NHD[0].flatten(1))

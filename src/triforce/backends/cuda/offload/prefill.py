"""A prompt read layer by layer, all of its tokens through one before the next: so KV leaves the device once.

Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from triforce.backends.cuda.kv import mix
from triforce.backends.cuda.offload.layout import runs_of
from triforce.backends.cuda.offload.residency import OffloadManager
from triforce.backends.cuda.triton.attention import DevicePageTable
from triforce.backends.cuda.triton.page_copy import KeysValues
from triforce.backends.kernel_api import PAGE, ForwardBatch, LayerBackend, ModelBackend, PageTable, Rotation, pages_for
from triforce.backends.torch.kv import WIDE

AT_ONCE = 8192
"""Tokens that go through a layer together, counted from the text's start."""


def read(
    hosted: OffloadManager, tables_PF: Rotation, model: ModelBackend, ids_1T: Tensor, this: ForwardBatch
) -> Iterator[int]:
    """As `Offloaded.read`, a layer at a time: between two layers the buffers are others'."""
    (start,), (table,), T, device = this.positions, this.tables, ids_1T.shape[1], hosted.device
    earlier, new = runs_of(sorted(table[: pages_for(start)])), table[start // PAGE : pages_for(start + T)]
    hosted.store([*hosted.seats.leaving(table, start), *hosted.seats.fresh(new[:1])])
    hosted.leave(new)
    leaving, x_TC = runs_of(sorted(new)), model.embed(ids_1T.flatten().to(device))
    ends = [*range((start // AT_ONCE + 1) * AT_ONCE, start + T, AT_ONCE), start + T]
    places, lane, units_1U = hosted.places, hosted.lane, this.views[0][1].units
    try:
        for layer, block in enumerate(model.blocks):
            whole = layer in places.home
            if not whole:
                lane.after(lane.computed())
                buffer = hosted.buffers.fill(partial(places.copies_in, layer, earlier))
                hosted.buffers.use(buffer)
            home = places.home[layer] if whole else buffer
            for at, end in zip([start, *ends], ends, strict=False):
                x_NC, last = x_TC[at - start : end - start], layer + 1 == len(model.blocks)
                _through(block, x_NC, at, units_1U, tables_PF, places.of_home(home), last)
            if not whole:
                hosted.buffers.leave(home, places.copies_out(layer, leaving, home))
            yield (layer + 1) * T // len(model.blocks)
        hosted.seats.store(new)
    finally:
        lane.hold(lane.reached())


def _through(
    block: LayerBackend, x_NC: Tensor, at: int, units_1U: Tensor, tables_PF: Rotation, kv: KeysValues, last: bool
) -> None:
    """Tokens from `at` on through one layer; behind the last one nobody asks for what they come to."""
    count = len(x_NC)
    q_1NHD, k_1NGD, v_1NGD = (x.view(1, *x.shape) for x in block.qkv(x_NC))
    at_1, count_1 = (torch.tensor([n], device=x_NC.device) for n in (at, count))
    wide = PageTable(units_1U, [at], [count]) if count > WIDE else None
    _, mixed_1NHD, _ = mix(
        (q_1NHD, k_1NGD, v_1NGD), at_1, tables_PF, DevicePageTable(units_1U, at_1, count_1, PAGE), kv, wide
    )
    if not last:
        block.finish(x_NC, mixed_1NHD[0].flatten(1))

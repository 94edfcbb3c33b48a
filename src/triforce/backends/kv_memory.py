"""Parts that KV memories of all kernels share: slots of a pass, layers of two kinds, the error where memory is short.

Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from triforce.arrays import Array, namespace, on_device_of
from triforce.backends.kernel_api import PageTable
from triforce.errors import CacheError, argument
from triforce.model.config import ModelConfig
from triforce.ragged import columns, ints, rows

Part = TypeVar("Part")


def slots_of(config: ModelConfig, tables: Sequence[PageTable], width: int, first_layer: int = 0) -> list[Array]:
    """Return the slots (N) of a pass's tokens in each layer from `first_layer` on; window layers may differ."""
    kinds = [bool(window) for window in config.windows[first_layer : first_layer + len(tables)]]
    slots_by_kind = {kind: slots(tables[kinds.index(kind)], width) for kind in {*kinds}}
    return [slots_by_kind[kind] for kind in kinds]


def slots(page_table: PageTable, width: int) -> Array:
    """Return the slots (N) of a pass's tokens, which are the keys from `starts` on; padding gets the scratch page."""
    units_BU = page_table.units if page_table.units.ndim == 2 else page_table.units[:, 0]
    unit = page_table.unit
    at_BT = columns(ints(page_table.starts), width)
    place_BT = np.minimum(at_BT // unit, units_BU.shape[1] - 1)
    place_BT, row_B1, offset_BT, real_BT = (
        on_device_of(host, units_BU)
        for host in (
            place_BT, rows(len(place_BT)), at_BT % unit, np.arange(width) < ints(page_table.counts)[:, None],
        )
    )  # fmt: skip
    xp = namespace(units_BU)
    slots_BT = xp.astype(units_BU[row_B1, place_BT], xp.int64) * unit + offset_BT
    return (slots_BT * real_BT).reshape(-1)


def in_order(kinds: Sequence[bool], *parts: Sequence[Part]) -> list[Part]:
    """Merge the items of two kinds of layers in layer order.

    kinds: each layer's kind. parts: two sequences, the items of the False layers and those of the True layers.
    """
    iterators = [iter(part) for part in parts]
    return [next(iterators[kind]) for kind in kinds]


def kv_memory_error(size: int) -> CacheError:
    """Return the error where memory is short. size: bytes that keys and values need."""
    return CacheError(
        f"the KV cache needs {size / 2**30:.1f} GiB, more than there is. Use a smaller max_tokens, a shorter prompt, "
        f"fewer rows at once, {argument('context')}, {argument('kv_offload', 'host')}, or "
        f"{argument('dtype', 'bfloat16')}"
    )

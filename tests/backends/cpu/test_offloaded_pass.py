"""Passes over KV in a store have the bits of passes over the same KV in memory, for any resident pages.

Shape suffixes as in backends/kernel_api.py.
"""

from __future__ import annotations

import os
import random
import tempfile
from dataclasses import replace
from typing import Any
from weakref import finalize

import numpy as np
import pytest
import torch

from tests.helpers.paged_kv import PAGE, native
from triforce.arrays import HOST_TYPES, Array, DType, itemsize
from triforce.backends.kernel_api import SECTOR, ForwardBatch, OffloadLayout, PageTable
from triforce.backends.layerwise import forward_layerwise
from triforce.errors import CacheError

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
from tests.helpers.random_model import D, G, L, V, random_model
from triforce.backends.cpu.kv import NativeKV
from triforce.backends.cpu.model import NativeModel
from triforce.backends.cpu.offload import NativeOffloadedKV

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("dtype")
PAGES, TEXT = 120, 1700  # pages of the memory, and tokens of a text: several splits, with room for another one
FRAMES, BUFFERS, BUFFER = 288, 2, 256
"""Resident pages: under half of the 640 pages that the text has in all layers and heads."""


class Host:
    file = direct = -1

    def __init__(self, size: int) -> None:
        self.bytes, self.memory, self.usage = size, np.empty(size, np.uint8), (size, 0)


class File:
    memory = None

    def __init__(self, size: int) -> None:
        self.file, path = tempfile.mkstemp()
        os.unlink(path)
        finalize(self, os.close, self.file)
        self.bytes, self.direct, self.usage = size, -1, (0, size)
        os.ftruncate(self.file, size)


def memories(dtype: DType, kind: type[Host] | type[File]) -> tuple[NativeModel, NativeKV, NativeOffloadedKV]:
    config, model = random_model(torch.Generator().manual_seed(1), dtype)
    page = 2 * PAGE * D * itemsize(dtype)
    size = -(-L * G * (PAGES + 1) * page // SECTOR) * SECTOR
    room = OffloadLayout(kind(size), page, FRAMES, BUFFERS, BUFFER, resident_layers=1, written_pages=40)
    return model, NativeKV(config, PAGES, dtype), NativeOffloadedKV(config, PAGES, dtype, room)


class Text:
    """One row that grows. `units` are its pages, in any order."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.units = np.array(self.draw.sample(range(1, PAGES + 1), PAGES - 4), np.int32)
        self.length = 0

    def full(self, width: int, **options: Any) -> ForwardBatch:
        lists = PageTable(self.units[None, : -(-(self.length + width) // PAGE)], [self.length], [width])
        return ForwardBatch([self.length], [(L, lists)], return_mass=True, past_committed=True, **options)

    def selected(self, width: int) -> ForwardBatch:
        """Return a batch in which each layer and head sees some pages of its own, and the latest pages."""
        new = self.units[self.length // PAGE : -(-(self.length + width) // PAGE)]
        picks = [self.draw.sample(range(self.length // PAGE), 7) for _ in range(L * G)]
        units = np.stack([np.concatenate([self.units[sorted(page_picks)], new]) for page_picks in picks])
        lists = PageTable(units.reshape(L, 1, G, -1), [7 * PAGE + self.length % PAGE], [width])
        return ForwardBatch([self.length], [(L, lists)])

    def ids(self, width: int) -> Array:
        return np.array([[self.draw.randrange(V) for _ in range(width)]])


def same(
    text: Text,
    batch: ForwardBatch,
    model: NativeModel,
    resident_kv: NativeKV,
    offloaded_kv: NativeOffloadedKV,
    layered: bool = False,
) -> bool:
    ids_1T = text.ids(batch.views[0][1].counts[0])
    resident_output = model.forward(ids_1T, resident_kv, batch, None)
    offloaded_output = (
        forward_layerwise(model, ids_1T, offloaded_kv, batch, None)
        if layered
        else model.forward(ids_1T, offloaded_kv, batch, None)
    )
    masses = resident_output.mass_LBGU, offloaded_output.mass_LBGU
    return np.array_equal(resident_output.logits_BJV, offloaded_output.logits_BJV) and (
        masses[0] is None or np.array_equal(*masses)
    )


@pytest.mark.parametrize("kind", [Host, File])
@pytest.mark.parametrize("layered", [False, True])
def test_offloaded_pass_bits_equal_memory(kind: type[Host] | type[File], layered: bool, dtype_name: DType) -> None:
    model, resident_kv, offloaded_kv = memories(dtype_name, kind)
    text = Text(5)
    offloaded_kv.reserve(text.units.tolist())
    while text.length < TEXT:
        width = min(text.draw.choice([1, 16, 100, 256]), TEXT - text.length)
        assert same(text, text.full(width), model, resident_kv, offloaded_kv, layered)
        text.length += width
    for step in range(12):
        if step == 6:
            offloaded_kv.prefer([2])
        assert same(text, text.selected(3), model, resident_kv, offloaded_kv, layered)
        width = text.draw.choice([1, 2, 7])
        assert same(text, text.full(width, retained_pages=7), model, resident_kv, offloaded_kv, layered)
        text.length += width
    streamed, fetched, resident_pages = offloaded_kv.native_offload.page_counts
    assert streamed > 12 * 300 and fetched and resident_pages


def test_zeroed_store_changes_bits(dtype_name: DType) -> None:
    """Negative control: zeros that are written behind the store's back change the logits."""
    model, resident_kv, offloaded_kv = memories(dtype_name, Host)
    text = Text(6)
    while text.length < TEXT:
        assert same(text, text.full(100), model, resident_kv, offloaded_kv)
        text.length += 100
    offloaded_kv.offload_layout.store.memory[: offloaded_kv.offload_layout.store.bytes // 2] = 0
    assert not same(text, text.full(1), model, resident_kv, offloaded_kv)


def test_forgotten_page_read_raises(dtype_name: DType) -> None:
    model, resident_kv, offloaded_kv = memories(dtype_name, Host)
    text = Text(7)
    for _ in range(TEXT // 100):
        assert same(text, text.full(100), model, resident_kv, offloaded_kv)
        text.length += 100
    offloaded_kv.forget(text.units[:40].tolist())
    with pytest.raises(CacheError, match="is lost"):
        model.forward(text.ids(1), offloaded_kv, text.full(1), None)


def test_layers_are_read_in_order(dtype_name: DType) -> None:
    _, _, offloaded_kv = memories(dtype_name, Host)
    units_1U = np.arange(1, 3, dtype=np.int32)[None]
    q_BTHD = np.zeros((1, 1, 2 * G, D), HOST_TYPES[dtype_name])
    attend = offloaded_kv.attend_of(ForwardBatch([0], [(2, PageTable(units_1U, [0], [1]))]), 1, 0)
    with pytest.raises(ValueError, match="in their order"):
        attend(1, q_BTHD, None)
    attend(0, q_BTHD, None)
    attend(1, q_BTHD, None)
    for layer in (0, 1):
        with pytest.raises(ValueError, match="in their order"):
            attend(layer, q_BTHD, None)
    for first_layer, layers in ((-1, 1), (2, 2), (0, 0)):
        with pytest.raises((ValueError, IndexError)):
            offloaded_kv.attend_of(ForwardBatch([0], [(layers, PageTable(units_1U, [0], [1]))]), 1, first_layer)
    for wrong in (replace(PageTable(units_1U, [0], [1]), starts=[32]), PageTable(units_1U + PAGES, [0], [1])):
        with pytest.raises(ValueError):
            offloaded_kv.attend_of(ForwardBatch([0], [(1, wrong)]), 1, 0)

"""Kernels for GPUs by themselves: attention by tiles of several kinds, and draws.

In Triton's interpreter they run on a CPU, too, where their times say nothing. Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.on_gpu.piece import Piece, Row, Setup, of_limit
from triforce.backends.cuda.kv_pages import write_rows
from triforce.backends.cuda.sampler import TritonNoise, TritonSampling
from triforce.backends.cuda.splits import SHARED_UNITS
from triforce.backends.cuda.triton import attention
from triforce.backends.cuda.triton.attention import DevicePageTable, Tile, attend, tile_of
from triforce.backends.cuda.triton.sampler import SamplerInputs, by_race
from triforce.backends.kernel_api import PAGE
from triforce.backends.torch.int8_rows import rounded
from triforce.bench import shapes
from triforce.interface.sampling_params import SamplingParams
from triforce.model.config import SCALE_BYTES
from triforce.model.kv_rows import hadamard_block
from triforce.speculation import Seeded

WIDTHS = (1, 8, 16)
TILES = ((64, 2, 3), (32, 2, 4), (32, 4, 4), (64, 4, 2), (64, 4, 3), (128, 4, 2), (64, 8, 3), (64, 8, 5))
"""Keys of a block, warps and stages."""
SPLITS = (512, 1024, 2048)
VOCABULARIES = (32_000, 128_256)
COLUMNS = (1, 8)


def attentions(setup: Setup, shape: str, context: int) -> Iterator[Piece]:
    """Attention over all keys with the mass of pages: our own tile, others, other splits; widths of up to 64 rows."""
    s = shapes.SHAPES[shape]
    for width in WIDTHS:
        rows = width * s.heads // s.kv_heads
        height = min(64, max(16, 1 << (rows - 1).bit_length()))
        own_tile = tile_of(setup.dtype.itemsize, s.head_dim, rows, setup.kv_int8)
        tiles = [own_tile, *(tile for tile_shape in TILES if (tile := Tile(height, *tile_shape)) != own_tile)]
        for tile, split in [(tile, SHARED_UNITS) for tile in tiles] + [
            (own_tile, split) for split in SPLITS if split != SHARED_UNITS
        ]:
            how = f"{tile.rows} x {tile.keys}, {tile.warps} warps, {tile.stages} stages, split {split}"
            what = f"attention, width {width}, {how}{', our own' * ((tile, split) == (own_tile, SHARED_UNITS))}"
            yield Piece(what, shape, context, partial(attend_once, setup, shape, context, width, tile, split))


def attend_once(setup: Setup, shape: str, context: int, width: int, tile: Tile, split: int) -> Row:
    """One layer's: its keys and values are more than a cache holds."""
    s = shapes.SHAPES[shape]
    pages = context // PAGE
    random = partial(torch.randn, dtype=setup.dtype, device=setup.device)
    keys_GSD, values_GSD = (random(s.kv_heads, pages * PAGE, s.head_dim) for _ in range(2))
    if setup.kv_int8:
        keys_GSD, values_GSD = map(_coded, (keys_GSD, values_GSD))
    together = hadamard_block(s.head_dim) if setup.kv_int8 else 1
    q_BTHD = random(1, width, s.heads, s.head_dim)
    units = torch.randperm(pages, device=setup.device).int()[None]
    starts_B, counts_B = (torch.tensor([n], device=setup.device) for n in (pages * PAGE - width, width))
    page_table = DevicePageTable(units, starts_B, counts_B, PAGE)
    with mock.patch.object(attention, "tile_of", lambda *_: tile):
        run = partial(attend, q_BTHD, keys_GSD, values_GSD, page_table, True, None, split, together)
        took = setup.clock.device_seconds(run, 10 if setup.on_gpu else 1)
    return of_limit(setup, took, keys_GSD.nbytes + values_GSD.nbytes)


def _coded(memory_GSD: Tensor) -> Tensor:
    """Return the same keys and values as pages of int8 KV."""
    G, S, D = memory_GSD.shape
    coded_GSR = torch.zeros(G, S, D + SCALE_BYTES, dtype=torch.int8, device=memory_GSD.device)
    write_rows(coded_GSR, torch.arange(S, device=memory_GSD.device), rounded(memory_GSD))
    return coded_GSR


def draws(setup: Setup) -> Iterator[Piece]:
    """Draws at temperature 0.6 and top-p 0.9 from laws as narrow as those of texts, one column or several."""
    for vocabulary in VOCABULARIES:
        for columns in COLUMNS:
            name = f"draw from {vocabulary} tokens, {columns} columns"
            yield Piece(name, "none", columns, partial(_draw, setup, vocabulary, columns))


def _draw(setup: Setup, vocabulary: int, columns: int) -> Row:
    params = SamplingParams(0.6, top_p=0.9)
    sampling = TritonSampling([params], [0], vocabulary, Seeded(TritonNoise([1], [0], setup.device)), setup.device)
    draws = sampling.draws(0, columns, np.ones(1, np.bool_))
    assert draws, "nothing changes its logits"
    logits_BJV = shapes.LOGIT_DEVIATION * torch.randn(1, columns, vocabulary, device=setup.device)
    places_2B = torch.tensor([[100], [columns - 1]], device=setup.device)
    asked = SamplerInputs(logits_BJV, draws.settings_5B, places_2B)
    took = setup.clock.device_seconds(partial(by_race, asked, draws.seeds_B, draws.choices_B), 10)
    return of_limit(setup, took, logits_BJV.nbytes)

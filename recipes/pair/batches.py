"""Batches that depend on (seed, stage, step) alone, so that a resumed run sees what an unbroken one would have.

Where a stage has a `span`, its windows are made of pieces of one stretch of text, each at its true position in it:
distances of the whole span are learnt at the cost of a short window (the idea of PoSE, Zhu et al. 2023, with the real
text at its place).

Shapes: R rows, T tokens of context, W = T + 1 tokens of a window.
"""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from tokenizers import Tokenizer

from recipes.pair.config import Stage
from recipes.pair.plants import AVOIDED, Plant, Records, plant_copies, plant_echoes, plant_loops

IGNORED = -100
ANYTHING_BUT = -1000

Row = tuple[np.ndarray, np.ndarray, np.ndarray]


class Batches:
    """Draws windows from the packed sources, and plants repetitions in a share of them."""

    def __init__(self, folder: Path, words: Tokenizer, stage: Stage, seed: int) -> None:
        """Maps the training tokens of each source of `stage.mix`."""
        self.stage = stage
        self.seed = seed
        self.tokens = {source: np.load(folder / f"{source}.train.npy", mmap_mode="r") for source in stage.mix}
        self.plants: dict[str, Plant] = {
            "copies": plant_copies,
            "echoes": plant_echoes,
            "loops": plant_loops,
            "records": Records.of(words),
        }

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns int64 inputs_RT, positions_RT and labels_RT of one step.

        Labels that cannot be predicted are -100; -1000 - x stands for any token but x.
        """
        rng = np.random.default_rng([self.seed, crc32(self.stage.name.encode()), step])
        windows, positions, known_rows = zip(*(self._row(rng) for _ in range(self.stage.rows)), strict=True)
        windows_RW = np.stack(windows)
        known_RW = np.stack(known_rows)
        labels_RW = np.select([known_RW == 1, known_RW == AVOIDED], [windows_RW, ANYTHING_BUT - windows_RW], IGNORED)
        return (
            torch.from_numpy(windows_RW[:, :-1]),
            torch.from_numpy(np.stack(positions)[:, :-1]),
            torch.from_numpy(labels_RW[:, 1:]),
        )

    def _row(self, rng: np.random.Generator) -> Row:
        sources, shares = zip(*self.stage.mix.items(), strict=True)
        tokens = self.tokens[rng.choice(sources, p=np.array(shares) / sum(shares))]
        span = min(self.stage.span, len(tokens) - 1) if rng.random() < self.stage.stretched else 0
        positions_W = places(self.stage.length + 1, span, self.stage.pieces, rng)
        start = rng.integers(len(tokens) - positions_W[-1])
        window_W = tokens[start + positions_W].astype(np.int64)
        known_W = (np.diff(positions_W, prepend=-1) == 1).astype(np.int8)
        kinds, shares = zip(("", 1.0 - sum(self.stage.planted.values())), *self.stage.planted.items(), strict=True)
        if kind := rng.choice(kinds, p=shares):
            self.plants[kind](window_W, known_W, rng)
        return window_W, positions_W, known_W


def places(size: int, span: int, pieces: int, rng: np.random.Generator) -> np.ndarray:
    """Positions of `size` tokens: consecutive, or in up to `pieces` pieces with gaps that add up to `span` at most.

    The stretch that the pieces lie in is log-uniform in length, so that each order of distance is seen as often.
    """
    positions_W = np.arange(size)
    if span > size:
        stretch = int(np.exp(rng.uniform(np.log(size), np.log(span))))
        cuts = np.sort(rng.integers(1, size, int(rng.integers(1, pieces))))
        shares = np.sort(rng.integers(0, stretch - size + 1, len(cuts)))
        shares[-1] = stretch - size
        for cut, low_share, high_share in zip(cuts, [0, *shares], shares, strict=False):
            positions_W[cut:] += high_share - low_share
    return positions_W

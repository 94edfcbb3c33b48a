"""Training batches. They depend on seed, stage and step alone, so a resumed run has the batches of an unbroken run.

If a stage has a `span`, its windows consist of pieces of one stretch of text, each at its true position. So the model
learns distances of the whole span at the cost of a short window (PoSE, Zhu et al. 2023, with the true positions).

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
"""Label of a position without a loss."""
AVOIDED_BASE = -1000
"""Base of labels of tokens to avoid: the label of token x is this number less x."""

Row = tuple[np.ndarray, np.ndarray, np.ndarray]


class Batches:
    """Batches of windows from the packed sources. A share of the windows has planted repetitions."""

    def __init__(self, folder: Path, words: Tokenizer, stage: Stage, seed: int) -> None:
        """Map the training tokens of each source of `stage.mix` into memory."""
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
        """Return int64 inputs_RT, positions_RT and labels_RT of one step.

        A label is a token to predict, `IGNORED`, or `AVOIDED_BASE` less a token to avoid.
        """
        rng = np.random.default_rng([self.seed, crc32(self.stage.name.encode()), step])
        windows, positions, mark_rows = zip(*(self._row(rng) for _ in range(self.stage.rows)), strict=True)
        windows_RW = np.stack(windows)
        marks_RW = np.stack(mark_rows)
        labels_RW = np.select([marks_RW == 1, marks_RW == AVOIDED], [windows_RW, AVOIDED_BASE - windows_RW], IGNORED)
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
        marks_W = (np.diff(positions_W, prepend=-1) == 1).astype(np.int8)
        kinds, shares = zip(("", 1.0 - sum(self.stage.planted.values())), *self.stage.planted.items(), strict=True)
        if kind := rng.choice(kinds, p=shares):
            self.plants[kind](window_W, marks_W, rng)
        return window_W, positions_W, marks_W


def places(size: int, span: int, pieces: int, rng: np.random.Generator) -> np.ndarray:
    """Return the positions of `size` tokens: consecutive ones, or up to `pieces` pieces within at most `span` tokens.

    The length from the first piece to the last is log-uniform, so each order of magnitude of distances is equally
    frequent.
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

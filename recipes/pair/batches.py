"""Batches that depend on (seed, stage, step) alone, so that a resumed run sees what an unbroken one would have.

Shapes: R rows, T tokens of context, W = T + 1 tokens of a window.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

from recipes.pair.config import Stage

IGNORED = -100
RECORD = (2, 3)  # tokens of a planted key and of its value: enough that no two keys are alike, short enough to be cheap

Plant = Callable[[np.ndarray, np.ndarray, np.random.Generator], None]


class Batches:
    """Draws windows from the packed sources, and plants repetitions in a share of them."""

    def __init__(self, folder: Path, stage: Stage, seed: int) -> None:
        """Maps the training tokens of each source of `stage.mix`."""
        self.stage, self.seed = stage, seed
        self.tokens = {source: np.load(folder / f"{source}.train.npy", mmap_mode="r") for source in stage.mix}

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns int64 inputs_RT and labels_RT of one step; labels that cannot be predicted are -100."""
        rng = np.random.default_rng([self.seed, crc32(self.stage.name.encode()), step])
        rows = [self._row(rng) for _ in range(self.stage.rows)]
        inputs_RT = torch.from_numpy(np.stack([window[:-1] for window, _ in rows]))
        labels_RT = torch.from_numpy(np.stack([np.where(known, window, IGNORED)[1:] for window, known in rows]))
        return inputs_RT, labels_RT

    def _row(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        sources, shares = zip(*self.stage.mix.items(), strict=True)
        tokens = self.tokens[rng.choice(sources, p=np.array(shares) / sum(shares))]
        start = rng.integers(len(tokens) - self.stage.length)
        window_W = tokens[start : start + self.stage.length + 1].astype(np.int64)
        known_W = np.ones(len(window_W), dtype=bool)
        kinds, shares = zip(("", 1.0 - sum(self.stage.planted.values())), *self.stage.planted.items(), strict=True)
        if kind := rng.choice(kinds, p=shares):
            PLANTS[kind](window_W, known_W, rng)
        return window_W, known_W


def plant_copies(window_W: np.ndarray, known_W: np.ndarray, rng: np.random.Generator) -> None:
    """Repeats spans of 8 to 127 tokens later in the window, at any distance; half of the spans are shuffled first."""
    for _ in range(max(1, len(window_W) // 512)):
        length = int(rng.integers(8, min(128, len(window_W) // 4)))
        first = rng.integers(len(window_W) - 2 * length)
        second = rng.integers(first + length, len(window_W) - length + 1)
        span = window_W[first : first + length].copy()
        if rng.random() < 0.5:
            rng.shuffle(span)
            known_W[first : first + length] = False
        window_W[first : first + length] = span
        window_W[second : second + length] = span
        known_W[second] = False


def plant_records(window_W: np.ndarray, known_W: np.ndarray, rng: np.random.Generator) -> None:
    """Scatters records (a key, a value) over the first half of the window, and asks for each again in the second."""
    keys, values = RECORD
    size = keys + values
    slots = rng.permutation(len(window_W) // size)
    half = len(slots) // 2
    count = max(1, min(64, len(window_W) // 64))
    written, asked = slots[slots < half][:count], slots[slots >= half][:count]
    vocabulary = window_W.copy()
    for first, second in zip(written * size, asked * size, strict=False):
        record = rng.choice(vocabulary, size)
        window_W[first : first + size] = window_W[second : second + size] = record
        known_W[first : first + size] = known_W[second : second + keys] = False


PLANTS: dict[str, Plant] = {"copies": plant_copies, "records": plant_records}

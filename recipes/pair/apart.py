"""Proof that the evaluation texts were not trained on: which windows of 50 tokens are in both.

Shapes: N tokens, M = N - 49 windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recipes.pair import files

WINDOW = 50
AT_ONCE = 1 << 20
MOST = 0.01
"""Of the tokens of a text: licence headers and a helper copied from the standard library are in many code bases."""

FACTOR = np.uint64(0x9E3779B97F4A7C15)


def run(work: Path) -> None:
    """Writes `apart.json`, once: how much of each evaluation text was trained on.

    Raises ValueError if that is more than boilerplate.
    """
    if (work / "apart.json").exists():
        return
    folder = work / "tokens"
    evaluation = {path.stem: np.load(path) for path in sorted((folder / "eval").glob("*.npy"))}
    training = [np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.*.npy"))]
    found = compare(evaluation, training)
    if seen := [name for name, text in found.items() if text["tokens"] > MOST * len(evaluation[name])]:
        raise ValueError(f"evaluation texts found in the training set: {', '.join(seen)}")
    files.write_json(work / "apart.json", found)


def compare(evaluation: dict[str, np.ndarray], training: list[np.ndarray]) -> dict[str, Any]:
    """Name to windows in all, windows found in training, tokens in those, and where each run of them starts."""
    wanted = {name: hashes(tokens_N) for name, tokens_N in evaluation.items()}
    known = np.unique(np.concatenate(list(wanted.values())))
    seen = [known[np.isin(known, part)] for tokens_N in training for part in _parts(tokens_N)]
    shared = np.unique(np.concatenate(seen))
    return {name: _shared(evaluation[name], np.isin(wanted[name], shared)) for name in wanted}


def hashes(tokens_N: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each window of 50 tokens, uint64 (M,): a polynomial in random images of the tokens.

    Different windows have the same one with a chance of about 2**-64: a hit is to be looked at, a miss is certain.
    """
    images = np.random.default_rng(0).integers(0, 2**64, 1 << 16, dtype=np.uint64)[tokens_N]
    count = max(0, len(tokens_N) - WINDOW + 1)
    sums = np.zeros(count, dtype=np.uint64)
    for offset in range(WINDOW):
        sums = sums * FACTOR + images[offset : offset + count]
    return sums


def _parts(tokens_N: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(tokens_N), AT_ONCE):
        yield hashes(tokens_N[start : start + AT_ONCE + WINDOW - 1])


def _shared(tokens_N: np.ndarray, found_M: np.ndarray) -> dict[str, Any]:
    (places,) = found_M.nonzero()
    covered = np.zeros(len(tokens_N), dtype=bool)
    for place in places:
        covered[place : place + WINDOW] = True
    starts = [int(place) for place in places if place == 0 or not found_M[place - 1]]
    return {"windows": len(found_M), "shared": len(places), "tokens": int(covered.sum()), "starts": starts}

"""Keeps evaluation texts out of the training set: shared windows of 50 tokens are cut from training texts.

Different names do not suffice, because code bases share licence headers and helpers.

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
FACTOR = np.uint64(0x9E3779B97F4A7C15)


def run(work: Path) -> None:
    """Write `apart.json`, once: the share of each evaluation text that is in the training set.

    Raises ValueError if the two sets share a window.
    """
    if (work / "apart.json").exists():
        return
    folder = work / "tokens"
    evaluation = {path.stem: np.load(path) for path in sorted((folder / "eval").glob("*.npy"))}
    training = [np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.*.npy"))]
    overlaps = compare(evaluation, training)
    if shared_texts := [name for name, text in overlaps.items() if text["shared"]]:
        raise ValueError(f"evaluation texts found in the training set: {', '.join(shared_texts)}")
    files.write_json(work / "apart.json", overlaps)


def cut(tokens_N: np.ndarray, evaluation: list[np.ndarray]) -> np.ndarray:
    """Return `tokens_N` without windows of evaluation texts. Such windows that arise across a cut are cut, too."""
    evaluation_hashes = np.unique(np.concatenate([hashes(text_N) for text_N in evaluation]))
    while (found_M := np.concatenate([_in(part, evaluation_hashes) for part in _parts(tokens_N)])).any():
        tokens_N = tokens_N[~_covered(len(tokens_N), found_M)]
    return tokens_N


def compare(evaluation: dict[str, np.ndarray], training: list[np.ndarray]) -> dict[str, Any]:
    """Return for each evaluation text the count of its windows, of shared windows, and of tokens in shared windows."""
    text_hashes = {name: hashes(tokens_N) for name, tokens_N in evaluation.items()}
    evaluation_hashes = np.unique(np.concatenate(list(text_hashes.values())))
    shared_hashes = [part[_in(part, evaluation_hashes)] for tokens_N in training for part in _parts(tokens_N)]
    shared = np.unique(np.concatenate(shared_hashes))
    return {name: _shared(evaluation[name], np.isin(text_hashes[name], shared)) for name in text_hashes}


def hashes(tokens_N: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of each window of 50 tokens, uint64 (M,): a polynomial in random images of the tokens.

    Equal windows have equal hashes. Different windows have the same hash with a probability of about 2**-64.
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
    covered_N = _covered(len(tokens_N), found_M)
    return {"windows": len(found_M), "shared": int(found_M.sum()), "tokens": int(covered_N.sum())}


def _in(part_M: np.ndarray, known_K: np.ndarray) -> np.ndarray:
    """Return which hashes are in the sorted `known_K`. `np.isin` would sort `known_K` again for each part."""
    return known_K[np.searchsorted(known_K, part_M).clip(max=len(known_K) - 1)] == part_M


def _covered(size: int, found_M: np.ndarray) -> np.ndarray:
    covered_N = np.zeros(size, dtype=bool)
    for place in found_M.nonzero()[0]:
        covered_N[place : place + WINDOW] = True
    return covered_N

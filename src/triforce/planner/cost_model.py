"""What a pass costs: learnt from the passes themselves, sampling included, and kept from run to run.

A pass over `width` tokens of each row, n of all rows, which see k keys between them, takes about a + b n + c k +
d width k seconds: a and c k are read whatever the width, the others are arithmetic. So does a draft's burst of `width`
guesses, which are made one after another: it begins with what other passes left of the caches, and goes on from there.
Fitted by least squares of the relative error, where the past fades.

All tiers share one machine: where passes that many others told of take longer than these say, or less, so will those of
the other tiers, which may have been seen last while the machine was busy.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from triforce.planner.acceptance import AcceptanceHistory
from triforce.planner.cadence import Kept
from triforce.planner.pass_fit import FEW, LEAST, TOGETHER, TRUSTED, PassFit
from triforce.planner.searched_layers import Finding, Findings

CHANGED = 1.4  # times what is expected, or that part of it: the machine is another one than it was


class CostModel:
    """Seconds of passes, and `shares` of guesses kept. `path`: where they are kept, if anywhere."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._fits, self.shares, self.layers = _read(path) if path else _nothing()
        self.trust: dict[str, float] = {}
        """In speculation, for texts of a kind (`SpeculationFallback.kept`)."""
        self.plain: dict[str, tuple[float, Kept]] = {}
        """Of texts of a kind that plain decoding was best for the tokens per second of each row that are to be
        expected, and how a text's pace goes on in the next one (`Cadence.kept`)."""

    def observe(self, tier: str, width: int, rows: int, keys: float, seconds: float, passes: int = 1) -> None:
        """So many alike, over `width` tokens of each row, or bursts of so many; `keys` are those of all rows."""
        if tier not in self._fits:
            self._fits[tier] = PassFit()
        self._fits[tier].add(width, rows, keys, seconds, passes)
        if self._fits[tier].fresh >= TOGETHER:
            self._see(self._fits[tier])

    def seconds(self, tier: str, width: float, rows: int, keys: float) -> float:
        """What a pass is expected to take; next to nothing where there was none yet, so that it will be tried."""
        base, each = self.line(tier, rows, keys)
        return max(base + width * each, LEAST)

    def line(self, tier: str, rows: int, keys: float) -> tuple[float, float]:
        """The same as a function of the width: what a pass takes whatever it is, and what each token more adds."""
        fit = self._fits.get(tier)
        if fit is None:
            return LEAST, 0.0
        if fit.fresh >= FEW or fit.passes < TOGETHER:
            self._see(fit)
        return fit.line(rows, keys)

    def told(self, tier: str, rows: int, keys: float) -> bool:
        """Whether there were enough passes like these to go by: what they take is no guess from quite other ones."""
        return tier in self._fits and self._fits[tier].told(rows, keys)

    def _see(self, fit: PassFit) -> None:
        """Look at the latest passes of a tier, and at what they say of the machine."""
        ratio = fit.speed()
        if not 1 / CHANGED < ratio < CHANGED:
            for each in self._fits.values():
                each.scale(ratio)
        fit.fold()

    def settle(self) -> None:
        """What has been seen so far is not forgotten: it had passes of all widths, and later ones may all be alike."""
        for fit in self._fits.values():
            fit.settle()

    def knows(self, *tiers: str) -> bool:
        """Whether there were enough passes of all of these tiers to go by."""
        return all(tier in self._fits and self._fits[tier].passes >= TRUSTED for tier in tiers)

    def save(self) -> None:
        """Keep them for the next process; a folder that cannot be written to is no harm."""
        if self.path is None:
            return
        passes = {tier: fit.saved() for tier, fit in self._fits.items()}
        layers = {case: asdict(found) for case, found in self.layers.items()}
        saved = {"passes": passes, "shares": self.shares.sums, "layers": layers}
        fresh = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(saved), encoding="utf-8")
            fresh.replace(self.path)
        except OSError:
            with suppress(OSError):
                fresh.unlink()


def _read(path: Path) -> Memory:
    """What was saved; nothing if it cannot be read: it is only a memory, and will be made again."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        fits = {
            str(tier): PassFit(_numbers(sums, 2, 4, 5), _numbers(lasting, 4, 5), int(passes))
            for tier, (sums, lasting, passes) in saved["passes"].items()
        }
        sums = {str(key): _numbers(pair, 2).tolist() for key, pair in saved["shares"].items()}
        layers = {str(case): Finding.read(found) for case, found in saved["layers"].items()}
        return fits, AcceptanceHistory(sums), layers
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError, np.linalg.LinAlgError):
        return _nothing()


def _nothing() -> Memory:
    return {}, AcceptanceHistory(), {}


def _numbers(saved: Any, *shape: int) -> np.ndarray:
    """Of this shape, and none below zero or beyond all bounds. Raises ValueError."""
    array = np.array(saved, float).reshape(shape)
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise ValueError("not a sum of what was seen")
    return array


Memory = tuple[dict[str, PassFit], AcceptanceHistory, Findings]

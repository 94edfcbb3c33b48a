"""What a pass costs: learnt from the passes themselves, sampling included, and kept from run to run.

A pass of a tier over n tokens of all rows, which see k keys between them, takes about a + b n + c k + d n k seconds: a
and c k are read whatever the width, the others are arithmetic. Fitted by least squares of the relative error, where the
past fades.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

FADE = 0.995  # of the past, per pass
SWEEPS = 100
OUTLIER = 2.0  # times what is expected: more than that counts as that, as the machine did something else
TRUSTED = 8  # passes
LEAST = 1e-6  # seconds


class Costs:
    """Seconds of passes. `path`: where they are kept, if anywhere."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._fits = _read(path) if path and path.exists() else {}

    def observe(self, tier: str, tokens: int, keys: int, seconds: float) -> None:
        """One pass."""
        fit = self._fits.setdefault(tier, _Fit())
        if fit.passes > TRUSTED:
            seconds = min(seconds, OUTLIER * fit.seconds(tokens, keys))
        fit.add(tokens, keys, seconds)

    def seconds(self, tier: str, tokens: float, keys: float) -> float:
        """What a pass is expected to take; next to nothing where there was none yet, so that it will be tried."""
        fit = self._fits.get(tier)
        return max(fit.seconds(tokens, keys), LEAST) if fit else LEAST

    def line(self, tier: str, rows: int, keys: int) -> tuple[float, float]:
        """The same as a function of each row's tokens: what a pass takes whatever they are, and what each adds."""
        base = self.seconds(tier, 0, keys)
        return base, self.seconds(tier, rows, keys) - base

    def knows(self, *tiers: str) -> bool:
        """Whether there were enough passes of all of these tiers to go by."""
        return all(tier in self._fits and self._fits[tier].passes >= TRUSTED for tier in tiers)

    def save(self) -> None:
        """Keep them for the next process; a folder that cannot be written to is no harm."""
        if self.path is None:
            return
        saved = {tier: (fit.moments.tolist(), fit.values.tolist(), fit.passes) for tier, fit in self._fits.items()}
        fresh = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(saved), encoding="utf-8")
            fresh.replace(self.path)
        except OSError:
            with suppress(OSError):
                fresh.unlink()


def _read(path: Path) -> dict[str, _Fit]:
    """What was saved; nothing if it cannot be read: it is only a memory, and will be made again."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(tier): _Fit(np.array(moments, float).reshape(4, 4), np.array(values, float).reshape(4), int(passes))
            for tier, (moments, values, passes) in saved.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


class _Fit:
    """Non-negative least squares on (1, n, k, n k): more work never takes less time."""

    def __init__(self, moments: np.ndarray | None = None, values: np.ndarray | None = None, passes: int = 0) -> None:
        self.moments = np.zeros((4, 4)) if moments is None else moments
        self.values = np.zeros(4) if values is None else values
        self.passes = passes
        self._solution = [0.0] * 4
        self._stale = True

    def add(self, tokens: int, keys: int, seconds: float) -> None:
        row = np.array(_features(tokens, keys)) / seconds
        self.moments = FADE * self.moments + np.outer(row, row)
        self.values = FADE * self.values + row
        self.passes += 1
        self._stale = True

    def seconds(self, tokens: float, keys: float) -> float:
        if self._stale:
            self._solve()
        return sum(x * feature for x, feature in zip(self._solution, _features(tokens, keys), strict=True))

    def _solve(self) -> None:
        """Coordinate descent from where the last one ended."""
        moments, values, x = self.moments.tolist(), self.values.tolist(), self._solution
        for _ in range(SWEEPS):
            for i, row in enumerate(moments):
                rest = values[i] - sum(m * other for j, (m, other) in enumerate(zip(row, x, strict=True)) if j != i)
                x[i] = max(0.0, rest / row[i]) if row[i] else 0.0
        self._stale = False


def _features(tokens: float, keys: float) -> tuple[float, float, float, float]:
    return 1.0, tokens, keys / 1000, tokens * keys / 1000

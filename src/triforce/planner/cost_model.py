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
from triforce.planner.searched_layers import Finding, Findings

FADE = 0.995  # of the past, per pass
LASTING = 8.0  # passes' worth of what was seen before `CostModel.settle`, which does not fade
TOGETHER = 64  # passes that are looked at at a time, at most
FEW = 16  # passes that change little where many were seen: that they were can wait
RIDGE = np.array([1e-9, 1e-3, 1e-6, 1e-3])
"""Of each sum, added to it: what was never varied then costs nothing more, and widths least of all. Else a wide pass
would be taken to cost as much as so many narrow ones, if those were all that was seen, and never be tried."""
OUTLIER = 3.0  # times what is expected: more than that counts as that, as the machine did something else
TRUSTED = 8  # passes
LEAST = 1e-6  # seconds
CHANGED = 1.4  # times what is expected, or that part of it: the machine is another one than it was
TOLD = 0.25  # leverage of a pass on its own forecast: those with less are told of by others
_NONE = np.zeros((2, 4, 5))


class CostModel:
    """Seconds of passes, and `shares` of guesses kept. `path`: where they are kept, if anywhere."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._fits, self.shares, self.layers = _read(path) if path else _nothing()
        self.trust: dict[str, float] = {}
        """In speculation, for texts of a kind (`Guard.kept`)."""
        self.plain: dict[str, tuple[float, Kept]] = {}
        """Of texts of a kind that plain decoding was best for the tokens per second of each row that are to be
        expected, and how a text's pace goes on in the next one (`Pace.kept`)."""

    def observe(self, tier: str, width: int, rows: int, keys: float, seconds: float, passes: int = 1) -> None:
        """So many alike, over `width` tokens of each row, or bursts of so many; `keys` are those of all rows."""
        if tier not in self._fits:
            self._fits[tier] = _Fit()
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

    def _see(self, fit: _Fit) -> None:
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
            str(tier): _Fit(_numbers(sums, 2, 4, 5), _numbers(lasting, 4, 5), int(passes))
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


class _Fit:
    """Non-negative least squares on (1, n, k, width k): more work never takes less time.

    Of what was seen it keeps sums of products, (4, 5): of these four with one another and with the seconds, each pass
    divided by its seconds; of passes over one token of each row, and of wider ones, which fade by their own kind only:
    plain decoding tells nothing of them. Those of `lasting` do not fade.
    """

    def __init__(self, sums: np.ndarray = _NONE, lasting: np.ndarray = _NONE[0], passes: int = 0) -> None:
        self._sums, self._lasting, self._passes = sums, lasting, passes
        self._fresh: list[tuple[float, float, float, float, int]] = []
        self._solution = _solved(self._total)

    @property
    def _total(self) -> np.ndarray:
        total: np.ndarray = self._sums.sum(0) + self._lasting
        return total

    @property
    def passes(self) -> int:
        return self._passes + sum(passes for *_, passes in self._fresh)

    @property
    def fresh(self) -> int:
        """How many observations wait to be looked at: many at a time, as one costs little more than that."""
        return len(self._fresh)

    def add(self, width: int, rows: int, keys: float, seconds: float, passes: int) -> None:
        self._fresh.append((width, rows, keys, seconds, passes))

    def speed(self) -> float:
        """Times what is expected that the latest passes took, in the median of those that others told of."""
        if self._passes < TOGETHER or not self._fresh:
            return 1.0
        *work, seconds_N, _ = np.array(self._fresh).T
        expected_N, told_N = self._expected(np.stack(_features(*work), 1))
        return float(np.median(seconds_N[told_N] / expected_N[told_N])) if told_N.sum() >= FEW else 1.0

    def _expected(self, rows_NF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of passes with these features, and whether enough others told of them: by their leverage."""
        sums = self._total
        scale_F = np.maximum(np.sqrt(np.diag(sums)), LEAST)
        moments_FF = sums[:, :4] / np.outer(scale_F, scale_F) + np.diag(RIDGE)
        expected_N = np.maximum(rows_NF @ self._solution, LEAST)
        known_NF = rows_NF / expected_N[:, None] / scale_F
        leverage_N = np.einsum("nf,fg,ng->n", known_NF, np.linalg.inv(moments_FF), known_NF)
        return expected_N, leverage_N < TOLD

    def scale(self, ratio: float) -> None:
        """What was seen before the latest passes would take so many times as long now."""
        by = np.array([ratio**-2] * 4 + [1 / ratio])
        self._sums, self._lasting = self._sums * by, self._lasting * by
        self._solution = _solved(self._total)

    def fold(self) -> None:
        """See the latest passes."""
        if not self._fresh:
            return
        *work, seconds_N, passes_N = np.array(self._fresh).T
        rows_NF = np.stack(_features(*work), 1)
        if self._passes > TRUSTED:
            expected_N, told_N = self._expected(rows_NF)
            seconds_N = np.where(told_N, np.minimum(seconds_N, OUTLIER * expected_N), seconds_N)
        rows_NF = rows_NF / np.maximum(seconds_N, LEAST)[:, None]
        wide_N = work[0] > 1
        narrow = _faded(self._sums[0], rows_NF, passes_N, ~wide_N)
        self._sums = np.stack((narrow, _faded(self._sums[1], rows_NF[wide_N], passes_N[wide_N])))
        self._passes += int(passes_N.sum())
        self._fresh.clear()
        self._solution = _solved(self._total)

    def settle(self) -> None:
        """Let `LASTING` passes' worth of what has been seen so far last."""
        self.fold()
        held = (1 - FADE**self._passes) / (1 - FADE)
        self._lasting = self._sums.sum(0) * min(1.0, LASTING / held)

    def saved(self) -> tuple[list[list[float]], list[list[float]], int]:
        self.fold()
        return self._sums.tolist(), self._lasting.tolist(), self.passes

    def line(self, rows: int, keys: float) -> tuple[float, float]:
        """See `CostModel.line`."""
        (a, b, c, d), thousands = self._solution.tolist(), keys / 1000
        return a + c * thousands, b * rows + d * thousands

    def told(self, rows: int, keys: float) -> bool:
        """See `CostModel.told`."""
        return bool(self._expected(np.array([_features(1, rows, keys)]))[1][0])


def _faded(sums: np.ndarray, rows_NF: np.ndarray, passes_N: np.ndarray, some_N: Any = slice(None)) -> np.ndarray:
    """What was seen, faded by these passes, and some of them."""
    if not len(rows_NF):
        return sums
    ends_N = passes_N.cumsum()
    weights_N = FADE ** (ends_N[-1] - ends_N) * (1 - FADE**passes_N) / (1 - FADE)
    rows_NF, weights_N = rows_NF[some_N], weights_N[some_N]
    new: np.ndarray = (rows_NF * weights_N[:, None]).T @ np.concatenate((rows_NF, np.ones((len(rows_NF), 1))), 1)
    faded: np.ndarray = FADE ** ends_N[-1] * sums + new
    return faded


def _solved(sums: np.ndarray) -> np.ndarray:
    """What is negative is left out, the worst first, until nothing is."""
    moments, values = sums[:, :4], sums[:, 4]
    scale = np.sqrt(np.diag(moments))
    used = [i for i in range(len(values)) if scale[i] > 0]
    while used:
        small = moments[np.ix_(used, used)] / np.outer(scale[used], scale[used])
        x = np.linalg.solve(small + np.diag(RIDGE[used]), values[used] / scale[used]) / scale[used]
        if (x >= 0).all():
            break
        del used[int((x * scale[used]).argmin())]
    solution = np.zeros(len(values))
    if used:
        solution[used] = x
    return solution


Memory = tuple[dict[str, _Fit], AcceptanceHistory, Findings]


def _features(width: Any, rows: Any, keys: Any) -> tuple[Any, Any, Any, Any]:
    return rows / rows, width * rows, keys / 1000, width * keys / 1000

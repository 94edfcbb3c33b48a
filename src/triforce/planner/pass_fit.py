"""Fit of a tier's seconds per pass to its work: non-negative least squares, where earlier passes fade."""

from __future__ import annotations

from typing import Any

import numpy as np

DECAY = 0.995  # of earlier passes, per pass

LASTING_PASSES = 8.0  # passes that what was observed before `CostModel.settle` counts as for good

BATCH = 64  # passes that are fitted at a time, at most

MIN_FRESH = 16  # passes: fewer change little where many were fitted, and wait

RIDGE = np.array([1e-9, 1e-3, 1e-6, 1e-3])
"""Part of each sum that is added to it: work that was never varied then costs nothing more, and width least of all.
Else a wide pass would be taken to cost as much as so many narrow ones, if all were narrow, and never be tried."""

OUTLIER = 3.0  # times the expected seconds: more counts as that, as the machine did something else

MIN_PASSES = 8  # passes after which a fit is used

MIN_SECONDS = 1e-6  # of a pass

MAX_LEVERAGE = 0.25  # of a pass on its own prediction: with less, other passes cover it

_NONE = np.zeros((2, 4, 5))


class PassFit:
    """Non-negative least squares on (1, n, k, width k), see `cost_model`: more work never takes less time.

    It keeps sums of products (2, 4, 5), of these four features with one another and with the seconds, each pass divided
    by its seconds: one of passes over one token of each row, one of wider passes. Each fades by passes of its own kind,
    as plain decoding shows nothing of wide passes. `lasting` (4, 5) does not fade.
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
        """Observations that wait to be fitted: many at a time cost little more than one."""
        return len(self._fresh)

    def add(self, width: int, rows: int, keys: float, seconds: float, passes: int) -> None:
        self._fresh.append((width, rows, keys, seconds, passes))

    def speed(self) -> float:
        """The median of measured over expected seconds, of the latest passes that earlier ones cover."""
        if self._passes < BATCH or not self._fresh:
            return 1.0
        *work, seconds_N, _ = np.array(self._fresh).T
        expected_N, covered_N = self._expected(np.stack(_features(*work), 1))
        return float(np.median(seconds_N[covered_N] / expected_N[covered_N])) if covered_N.sum() >= MIN_FRESH else 1.0

    def _expected(self, rows_NF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Expected seconds of passes with these features, and whether earlier passes cover them, by leverage."""
        sums = self._total
        scale_F = np.maximum(np.sqrt(np.diag(sums)), MIN_SECONDS)
        moments_FF = sums[:, :4] / np.outer(scale_F, scale_F) + np.diag(RIDGE)
        expected_N = np.maximum(rows_NF @ self._solution, MIN_SECONDS)
        known_NF = rows_NF / expected_N[:, None] / scale_F
        leverage_N = np.einsum("nf,fg,ng->n", known_NF, np.linalg.inv(moments_FF), known_NF)
        return expected_N, leverage_N < MAX_LEVERAGE

    def scale(self, ratio: float) -> None:
        """Multiply the seconds of all passes before the latest ones."""
        by = np.array([ratio**-2] * 4 + [1 / ratio])
        self._sums, self._lasting = self._sums * by, self._lasting * by
        self._solution = _solved(self._total)

    def fit(self) -> None:
        """Fit the latest passes."""
        if not self._fresh:
            return
        *work, seconds_N, passes_N = np.array(self._fresh).T
        rows_NF = np.stack(_features(*work), 1)
        if self._passes > MIN_PASSES:
            expected_N, covered_N = self._expected(rows_NF)
            seconds_N = np.where(covered_N, np.minimum(seconds_N, OUTLIER * expected_N), seconds_N)
        rows_NF = rows_NF / np.maximum(seconds_N, MIN_SECONDS)[:, None]
        wide_N = work[0] > 1
        narrow = _faded(self._sums[0], rows_NF, passes_N, ~wide_N)
        self._sums = np.stack((narrow, _faded(self._sums[1], rows_NF[wide_N], passes_N[wide_N])))
        self._passes += int(passes_N.sum())
        self._fresh.clear()
        self._solution = _solved(self._total)

    def settle(self) -> None:
        """Keep what was observed so far for good, counting as `LASTING_PASSES`."""
        self.fit()
        held = (1 - DECAY**self._passes) / (1 - DECAY)
        self._lasting = self._sums.sum(0) * min(1.0, LASTING_PASSES / held)

    def saved(self) -> tuple[list[list[float]], list[list[float]], int]:
        self.fit()
        return self._sums.tolist(), self._lasting.tolist(), self.passes

    def line(self, rows: int, keys: float) -> tuple[float, float]:
        """See `CostModel.line`."""
        (a, b, c, d), thousands = self._solution.tolist(), keys / 1000
        return a + c * thousands, b * rows + d * thousands

    def covers(self, rows: int, keys: float) -> bool:
        """See `CostModel.covers`."""
        return bool(self._expected(np.array([_features(1, rows, keys)]))[1][0])


def _faded(sums: np.ndarray, rows_NF: np.ndarray, passes_N: np.ndarray, some_N: Any = slice(None)) -> np.ndarray:
    """The sums, faded by these passes, plus those of some of them."""
    if not len(rows_NF):
        return sums
    ends_N = passes_N.cumsum()
    weights_N = DECAY ** (ends_N[-1] - ends_N) * (1 - DECAY**passes_N) / (1 - DECAY)
    rows_NF, weights_N = rows_NF[some_N], weights_N[some_N]
    new: np.ndarray = (rows_NF * weights_N[:, None]).T @ np.concatenate((rows_NF, np.ones((len(rows_NF), 1))), 1)
    faded: np.ndarray = DECAY ** ends_N[-1] * sums + new
    return faded


def _solved(sums: np.ndarray) -> np.ndarray:
    """The solution (4,) that is nowhere negative: features with negative weights are left out, the worst first."""
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


def _features(width: Any, rows: Any, keys: Any) -> tuple[Any, Any, Any, Any]:
    return rows / rows, width * rows, keys / 1000, width * keys / 1000

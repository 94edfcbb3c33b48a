"""Seconds of a tier's passes as a function of their work: non-negative least squares where the past fades."""

from __future__ import annotations

from typing import Any

import numpy as np

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

TOLD = 0.25  # leverage of a pass on its own forecast: those with less are told of by others

_NONE = np.zeros((2, 4, 5))


class PassFit:
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


def _features(width: Any, rows: Any, keys: Any) -> tuple[Any, Any, Any, Any]:
    return rows / rows, width * rows, keys / 1000, width * keys / 1000

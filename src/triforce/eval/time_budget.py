"""The time budget of a quick evaluation: as much as a minute holds, by the model's speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from triforce.eval.context import EvalContext
from triforce.eval.reading_time import ReadingForecast
from triforce.eval.sizes import QUICK, plan

MINUTE = 60.0
PREDICTED = 0.75 * MINUTE
"""Seconds of it for what is predicted; the rest is for errors of prediction."""

LEAST_EVIDENCE = 5.0
"""Predicted seconds after which a forecast is corrected; in fewer, work that is done once counts too much."""

Seconds = Callable[[EvalContext, ReadingForecast], float]


@dataclass(slots=True)
class TimeBudget:
    """Predicted seconds of each measurement, and those that there is no time for.

    began: when the minute did, by `perf_counter`. rate: tokens that the target reads in a second.
    """

    began: float
    rate: float
    predicted: dict[str, float]
    left_out: dict[str, float]
    _done: float = 0.0
    _since: float = 0.0

    @property
    def total(self) -> float:
        """Predicted seconds of all measurements."""
        return sum(self.predicted.values())

    def skip_reason(self, name: str) -> str:
        """Return why a measurement is skipped, judging by the others' pace; empty if it fits."""
        now = perf_counter()
        self._since = self._since or now
        slow = max(1.0, (now - self._since) / max(self._done, LEAST_EVIDENCE))
        wanted, left = slow * self.predicted[name], MINUTE - (now - self.began)
        if self._done and wanted > left:
            return f"it would take {wanted:.0f} s, and {max(left, 0):.0f} s of the minute are left"
        self._done += self.predicted[name]
        return ""


def fit(
    subject: EvalContext, asked: Sequence[str], forecast: ReadingForecast, costs: Mapping[str, Seconds], began: float
) -> TimeBudget:
    """Give the subject the largest quick plan that ends in time; if none does, leave out what is dearest."""
    context, names = subject.plan.deepest, [name for name in costs if name in asked]

    def predict() -> dict[str, float]:
        ahead = forecast.anew()
        return {name: costs[name](subject, ahead) for name in names}

    for longest in sorted({min(size, context) for size in QUICK}, reverse=True):
        subject.plan = plan(context, context, longest)
        predicted = predict()
        if sum(predicted.values()) <= PREDICTED:
            break
    left_out: dict[str, float] = {}
    while sum(predicted.values()) > PREDICTED and sum(seconds > 0 for seconds in predicted.values()) > 1:
        dearest = max(names, key=lambda name: predicted[name])
        left_out[dearest] = predicted[dearest]
        names.remove(dearest)
        predicted = predict()
    return TimeBudget(began, 1 / forecast.target.token, predicted, left_out)

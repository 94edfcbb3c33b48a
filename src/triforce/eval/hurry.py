"""A quick evaluation: as much as a minute holds, by how fast the model is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from triforce.eval.config import QUICK, plan
from triforce.eval.context import EvalContext
from triforce.eval.forecast import ReadingForecast

MINUTE = 60.0
PREDICTED = 0.75 * MINUTE
"""What the forecast may take of it; the rest is for what is predicted wrongly."""

ENOUGH = 5.0
"""Predicted seconds that say how good forecasts are; in fewer, what is done once would count too much."""

Seconds = Callable[[EvalContext, ReadingForecast], float]


@dataclass(slots=True)
class Hurry:
    """What each measurement is predicted to take, and what there is no time for.

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
        """Seconds that all of it is to take."""
        return sum(self.predicted.values())

    def late(self, name: str) -> str:
        """Why a measurement has to be left out, if so: if the others are a measure, it would not end in time."""
        now = perf_counter()
        self._since = self._since or now
        slow = max(1.0, (now - self._since) / max(self._done, ENOUGH))
        wanted, left = slow * self.predicted[name], MINUTE - (now - self.began)
        if self._done and wanted > left:
            return f"it would take {wanted:.0f} s, and {max(left, 0):.0f} s of the minute are left"
        self._done += self.predicted[name]
        return ""


def fit(
    subject: EvalContext, asked: Sequence[str], forecast: ReadingForecast, costs: Mapping[str, Seconds], began: float
) -> Hurry:
    """Give the subject the largest of the quick plans that ends in time; without what is dearest, if none does."""
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
    return Hurry(began, 1 / forecast.target.token, predicted, left_out)

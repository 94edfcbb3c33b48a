"""A quick evaluation: as much as a minute holds, by how fast the model is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from triforce.eval.config import QUICK, plan
from triforce.eval.context import EvalContext
from triforce.eval.forecast import ReadingForecast

MINUTE = 60.0
FORETOLD = 0.75 * MINUTE
"""What the forecast may take of it; the rest is for what is foretold wrongly."""

ENOUGH = 5.0
"""Foretold seconds that say how good forecasts are; in fewer, what is done once would count too much."""

Seconds = Callable[[EvalContext, ReadingForecast], float]


@dataclass(slots=True)
class Hurry:
    """What each measurement is foretold to take, and what there is no time for.

    began: when the minute did, by `perf_counter`. rate: tokens that the target reads in a second.
    """

    began: float
    rate: float
    foretold: dict[str, float]
    left_out: dict[str, float]
    _done: float = 0.0
    _since: float = 0.0

    @property
    def total(self) -> float:
        """Seconds that all of it is to take."""
        return sum(self.foretold.values())

    def late(self, name: str) -> str:
        """Why a measurement has to be left out, if so: if the others are a measure, it would not end in time."""
        now = perf_counter()
        self._since = self._since or now
        slow = max(1.0, (now - self._since) / max(self._done, ENOUGH))
        wanted, left = slow * self.foretold[name], MINUTE - (now - self.began)
        if self._done and wanted > left:
            return f"it would take {wanted:.0f} s, and {max(left, 0):.0f} s of the minute are left"
        self._done += self.foretold[name]
        return ""


def fit(
    subject: EvalContext, asked: Sequence[str], forecast: ReadingForecast, costs: Mapping[str, Seconds], began: float
) -> Hurry:
    """Give the subject the largest of the quick plans that ends in time; without what is dearest, if none does."""
    context, names = subject.plan.deepest, [name for name in costs if name in asked]

    def foretell() -> dict[str, float]:
        ahead = forecast.anew()
        return {name: costs[name](subject, ahead) for name in names}

    for longest in sorted({min(size, context) for size in QUICK}, reverse=True):
        subject.plan = plan(context, context, longest)
        foretold = foretell()
        if sum(foretold.values()) <= FORETOLD:
            break
    left_out: dict[str, float] = {}
    while sum(foretold.values()) > FORETOLD and sum(seconds > 0 for seconds in foretold.values()) > 1:
        dearest = max(names, key=lambda name: foretold[name])
        left_out[dearest] = foretold[dearest]
        names.remove(dearest)
        foretold = foretell()
    return Hurry(began, 1 / forecast.target.token, foretold, left_out)

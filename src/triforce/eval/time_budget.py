"""The time of evaluations: what readings take at the model's measured speed, and what a quick one has time for.

Shape suffixes as in scoring.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from torch import Tensor

from triforce.backends.decoder import Decoder
from triforce.eval.context import EvalContext, Text, plan
from triforce.eval.scoring import WIDTH, draft_view, full_view, parts, read
from triforce.kvcache import FullView, StreamingView

PACE_SECONDS = 2.0
"""Seconds for measuring one model's speed; its last pass may end later."""

PACE_TOKENS = 4096
"""Tokens read for that, at most."""

QUICK = (8_192, 4_096, 2_048, 1_024, 512, 256)
"""Longest readings of a quick evaluation: what there is time for."""

MINUTE = 60.0
PREDICTED = 0.75 * MINUTE
"""Seconds of it for what is predicted; the rest is for errors of prediction."""

LEAST_EVIDENCE = 5.0
"""Predicted seconds after which a forecast is corrected; in fewer, work that is done once counts too much."""


@dataclass(frozen=True, slots=True)
class ReadingPace:
    """Speed of a model in seconds: a token in a long pass, each token before it, a pass over one token."""

    token: float
    past_token: float
    step: float

    def reading(self, stop: int, start: int = 0) -> float:
        """Return seconds for tokens `start` to `stop` of a text, with those before them in sight."""
        return (stop - start) * (self.token + self.past_token * (start + stop) / 2)

    def steps(self, count: int, past_tokens: int = 0) -> float:
        """Return seconds for passes over one token each, after `past_tokens` tokens."""
        return count * (self.step + self.past_token * past_tokens)


@dataclass(eq=False)
class ReadingForecast:
    """Predicted seconds of readings; a trace is counted once."""

    target: ReadingPace
    draft: ReadingPace | None = None
    _traced: set[tuple[str, int, int]] = field(default_factory=set)

    def traces(self, windows: Iterable[Text]) -> float:
        """Return seconds of `EvalContext.trace` for windows that were not counted yet."""
        uncounted = {(window.name, window.start, len(window.ids_N)) for window in windows} - self._traced
        self._traced |= uncounted
        return sum(self.target.reading(length) for _, _, length in uncounted)

    def drafts(self, tokens: int) -> float:
        """Return seconds that the draft takes to read so many tokens."""
        return self.draft.reading(tokens) if self.draft else 0.0


Seconds = Callable[[EvalContext, ReadingForecast], float]
"""Predicts what a measurement takes."""


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
        timestamp = perf_counter()
        self._since = self._since or timestamp
        slowdown = max(1.0, (timestamp - self._since) / max(self._done, LEAST_EVIDENCE))
        needed_seconds = slowdown * self.predicted[name]
        remaining_seconds = MINUTE - (timestamp - self.began)
        if self._done and needed_seconds > remaining_seconds:
            return f"it would take {needed_seconds:.0f} s, and {max(remaining_seconds, 0):.0f} s of the minute are left"
        self._done += self.predicted[name]
        return ""


def fit_plan(
    subject: EvalContext,
    requested_names: Sequence[str],
    forecast: ReadingForecast,
    costs: Mapping[str, Seconds],
    began: float,
) -> TimeBudget:
    """Give the subject the largest quick plan that ends in time; if none does, leave out what is dearest."""
    context = subject.plan.deepest
    names = [name for name in costs if name in requested_names]

    def predict() -> dict[str, float]:
        plan_forecast = ReadingForecast(forecast.target, forecast.draft)  # nothing is counted yet
        return {name: costs[name](subject, plan_forecast) for name in names}

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


def measure_pace(subject: EvalContext) -> ReadingForecast:
    """Measure how fast the models of a subject are."""
    ids_N = max((text.ids_N for text in subject.texts), key=len)[: min(PACE_TOKENS, subject.plan.span)]
    target = _pace(subject.target, full_view(subject.target, len(ids_N)), ids_N)
    if subject.llm.draft is None:
        return ReadingForecast(target)
    draft = subject.llm.draft.decoder
    return ReadingForecast(target, _pace(draft, draft_view(draft), ids_N))


def _pace(decoder: Decoder, view: FullView | StreamingView, ids_N: Tensor) -> ReadingPace:
    """Passes over one token, and then longer ones as far as there is time; of each kind the first is slow."""
    step = [_timed(decoder, view, ids_T) for ids_T in parts(ids_N[:3], 1)][-1]
    began = perf_counter()
    read_tokens = min(3, len(ids_N))
    width = 16
    passes: list[tuple[int, float, float]] = []  # tokens, those before the middle one, seconds of a token
    while read_tokens + width <= len(ids_N) and perf_counter() - began < PACE_SECONDS:
        seconds = _timed(decoder, view, ids_N[read_tokens : read_tokens + width])
        passes.append((width, read_tokens + width / 2, seconds / width))
        read_tokens = read_tokens + width
        width = min(4 * width, WIDTH)
    longest_passes = [timed_pass for timed_pass in passes if timed_pass[0] == passes[-1][0]]
    settled_passes = longest_passes[len(longest_passes) > 1 :] or [(1, 0.0, step)]
    depths = [depth for _, depth, _ in settled_passes]
    costs = [cost for _, _, cost in settled_passes]
    if len(costs) < 3:
        return ReadingPace(min(step, float(np.mean(costs))), 0.0, step)
    past_token, token = np.polyfit(depths, costs, 1)
    if past_token <= 0 or token <= 0:
        return ReadingPace(float(np.mean(costs)), 0.0, step)
    return ReadingPace(float(token), float(past_token), step)


def _timed(decoder: Decoder, view: FullView | StreamingView, ids_T: Tensor) -> float:
    began = perf_counter()
    for logits_TV in read(decoder, view, ids_T):
        float(logits_TV[-1, 0])  # a device that computes is waited for
    return perf_counter() - began

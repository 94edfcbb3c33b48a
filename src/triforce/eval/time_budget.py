"""Time budget of evaluations: forecasts from the measured speed of the models, and configs that fit into a minute.

Shape suffixes as in scoring.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from torch import Tensor

from triforce.backends.decoder import Decoder
from triforce.eval.context import EvalContext, Text, eval_config
from triforce.eval.scoring import WIDTH, draft_view, full_view, parts, read
from triforce.kvcache import FullView, StreamingView

PACE_SECONDS = 2.0
"""Seconds for measuring one model's speed. The last pass may end later."""

PACE_TOKENS = 4096
"""Greatest number of tokens that are read to measure a model's speed."""

QUICK_LENGTHS = (8_192, 4_096, 2_048, 1_024, 512, 256)
"""Candidate lengths of the longest windows of a quick evaluation. The largest that fits is used."""

MINUTE = 60.0
PREDICTION_SECONDS = 0.75 * MINUTE
"""Seconds of the minute that predictions may fill. The rest is for errors of prediction."""

LEAST_EVIDENCE = 5.0
"""Predicted seconds after which a forecast is corrected. With fewer seconds, work that is done once counts too much."""


@dataclass(frozen=True, slots=True)
class ReadingPace:
    """Speed of a model in seconds: per token of a long pass, per token of past context, and per pass over one token."""

    token_seconds: float
    past_token_seconds: float
    single_token_seconds: float

    def reading_seconds(self, stop: int, start: int = 0) -> float:
        """Return seconds to read tokens `start` to `stop` of a text, each attending to all tokens before it."""
        return (stop - start) * (self.token_seconds + self.past_token_seconds * (start + stop) / 2)

    def step_seconds(self, count: int, past_tokens: int = 0) -> float:
        """Return seconds of `count` passes over one token each, after `past_tokens` tokens."""
        return count * (self.single_token_seconds + self.past_token_seconds * past_tokens)


@dataclass(eq=False)
class ReadingForecast:
    """Predicted seconds of prefills by target and draft. The trace of a window is counted once."""

    target: ReadingPace
    draft: ReadingPace | None = None
    _traced: set[tuple[str, int, int]] = field(default_factory=set)

    def trace_seconds(self, windows: Iterable[Text]) -> float:
        """Return seconds of `EvalContext.trace` for the windows that are not counted yet, and count them."""
        uncounted = {(window.name, window.start, len(window.ids_N)) for window in windows} - self._traced
        self._traced |= uncounted
        return sum(self.target.reading_seconds(length) for _, _, length in uncounted)

    def draft_seconds(self, tokens: int) -> float:
        """Return seconds that the draft takes to read `tokens`; 0 without a draft."""
        return self.draft.reading_seconds(tokens) if self.draft else 0.0


Seconds = Callable[[EvalContext, ReadingForecast], float]
"""Function that predicts the seconds of a measurement."""


@dataclass(slots=True)
class TimeBudget:
    """Predicted seconds of each measurement. left_out: predicted seconds of the measurements that do not fit.

    start: start of the minute, by `perf_counter`. rate: tokens that the target reads per second.
    """

    start: float
    rate: float
    predicted: dict[str, float]
    left_out: dict[str, float]
    _predicted_so_far: float = 0.0
    _first_check_time: float = 0.0

    @property
    def total(self) -> float:
        """Return the predicted seconds of all measurements."""
        return sum(self.predicted.values())

    def skip_reason(self, name: str) -> str:
        """Return why a measurement is skipped, judged by the speed of the earlier ones; an empty text if it fits."""
        timestamp = perf_counter()
        self._first_check_time = self._first_check_time or timestamp
        slowdown = max(1.0, (timestamp - self._first_check_time) / max(self._predicted_so_far, LEAST_EVIDENCE))
        needed_seconds = slowdown * self.predicted[name]
        remaining_seconds = MINUTE - (timestamp - self.start)
        if self._predicted_so_far and needed_seconds > remaining_seconds:
            return f"it would take {needed_seconds:.0f} s, and {max(remaining_seconds, 0):.0f} s of the minute are left"
        self._predicted_so_far += self.predicted[name]
        return ""


def fit_config(
    subject: EvalContext,
    requested_names: Sequence[str],
    forecast: ReadingForecast,
    costs: Mapping[str, Seconds],
    start: float,
) -> TimeBudget:
    """Give the subject the largest quick config that fits. If none fits, leave out the most expensive measurements."""
    context = subject.config.longest_window
    names = [name for name in costs if name in requested_names]

    def predict() -> dict[str, float]:
        config_forecast = ReadingForecast(forecast.target, forecast.draft)  # no trace is counted in it yet
        return {name: costs[name](subject, config_forecast) for name in names}

    for longest in sorted({min(size, context) for size in QUICK_LENGTHS}, reverse=True):
        subject.config = eval_config(context, context, longest)
        predicted = predict()
        if sum(predicted.values()) <= PREDICTION_SECONDS:
            break
    left_out: dict[str, float] = {}
    while sum(predicted.values()) > PREDICTION_SECONDS and sum(seconds > 0 for seconds in predicted.values()) > 1:
        costliest = max(names, key=lambda name: predicted[name])
        left_out[costliest] = predicted[costliest]
        names.remove(costliest)
        predicted = predict()
    return TimeBudget(start, 1 / forecast.target.token_seconds, predicted, left_out)


def measure_pace(subject: EvalContext) -> ReadingForecast:
    """Return a forecast with the measured speeds of the subject's target and draft."""
    ids_N = max((text.ids_N for text in subject.texts), key=len)[: min(PACE_TOKENS, subject.config.span)]
    target = _pace(subject.target, full_view(subject.target, len(ids_N)), ids_N)
    if subject.llm.draft is None:
        return ReadingForecast(target)
    draft = subject.llm.draft.decoder
    return ReadingForecast(target, _pace(draft, draft_view(draft), ids_N))


def _pace(decoder: Decoder, view: FullView | StreamingView, ids_N: Tensor) -> ReadingPace:
    """Measure passes over one token, then longer ones until the time is up. The first pass of each width is slow."""
    step = [_pass_seconds(decoder, view, ids_T) for ids_T in parts(ids_N[:3], 1)][-1]
    start = perf_counter()
    read_tokens = min(3, len(ids_N))
    width = 16
    passes: list[tuple[int, float, float]] = []  # tokens, tokens before the middle one, seconds per token
    while read_tokens + width <= len(ids_N) and perf_counter() - start < PACE_SECONDS:
        seconds = _pass_seconds(decoder, view, ids_N[read_tokens : read_tokens + width])
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


def _pass_seconds(decoder: Decoder, view: FullView | StreamingView, ids_T: Tensor) -> float:
    start = perf_counter()
    for logits_TV in read(decoder, view, ids_T):
        float(logits_TV[-1, 0])  # waits for the device
    return perf_counter() - start

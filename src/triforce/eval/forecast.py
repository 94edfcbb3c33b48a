"""How long measurements will take: the model's speed, measured in a few seconds, times what each of them reads.

Shape suffixes as in scoring.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from torch import Tensor

from triforce.backends.decoder import Decoder
from triforce.eval.context import EvalContext, Text
from triforce.eval.scoring import WIDTH, draft_view, full_view, parts, read
from triforce.kvcache import FullView, StreamingView

SECONDS = 2.0
"""For looking at one model's speed; its last pass may end later."""

MOST = 4096
"""Tokens that are read for that."""


@dataclass(frozen=True, slots=True)
class ReadingPace:
    """Seconds: of a token in a long pass, how many more for each token before it, and of a pass over one token."""

    token: float
    deeper: float
    step: float

    def reading(self, stop: int, start: int = 0) -> float:
        """Of the tokens from `start` to `stop` of a text, those before them in sight."""
        return (stop - start) * (self.token + self.deeper * (start + stop) / 2)

    def steps(self, count: int, before: int = 0) -> float:
        """Of passes over one token each, after so many."""
        return count * (self.step + self.deeper * before)


@dataclass(eq=False)
class ReadingForecast:
    """What readings will take; a trace that was counted before is there already."""

    target: ReadingPace
    draft: ReadingPace | None = None
    _traced: set[tuple[str, int, int]] = field(default_factory=set)

    def traces(self, windows: Iterable[Text]) -> float:
        """Seconds of `EvalContext.trace` for each of them."""
        fresh = {(window.name, window.start, len(window.ids_N)) for window in windows} - self._traced
        self._traced |= fresh
        return sum(self.target.reading(length) for _, _, length in fresh)

    def drafts(self, tokens: int) -> float:
        """Seconds that the draft takes for so many."""
        return self.draft.reading(tokens) if self.draft else 0.0

    def anew(self) -> ReadingForecast:
        """The same, of another plan."""
        return ReadingForecast(self.target, self.draft)


def look(subject: EvalContext) -> ReadingForecast:
    """Measure how fast the models of a subject are."""
    ids_N = max((text.ids_N for text in subject.texts), key=len)[: min(MOST, subject.plan.span)]
    target = _pace(subject.target, full_view(subject.target, len(ids_N)), ids_N)
    if subject.llm.draft is None:
        return ReadingForecast(target)
    draft = subject.llm.draft.decoder
    return ReadingForecast(target, _pace(draft, draft_view(draft), ids_N))


def _pace(decoder: Decoder, view: FullView | StreamingView, ids_N: Tensor) -> ReadingPace:
    """Passes over one token, and then longer ones as far as there is time; of each kind the first is slow."""
    step = [_timed(decoder, view, ids_T) for ids_T in parts(ids_N[:3], 1)][-1]
    began, done, width = perf_counter(), min(3, len(ids_N)), 16
    passes: list[tuple[int, float, float]] = []  # tokens, those before the middle one, seconds of a token
    while done + width <= len(ids_N) and perf_counter() - began < SECONDS:
        seconds = _timed(decoder, view, ids_N[done : done + width])
        passes.append((width, done + width / 2, seconds / width))
        done, width = done + width, min(4 * width, WIDTH)
    longest = [one for one in passes if one[0] == passes[-1][0]]
    settled = longest[len(longest) > 1 :] or [(1, 0.0, step)]
    depths, costs = [depth for _, depth, _ in settled], [cost for _, _, cost in settled]
    if len(costs) < 3:
        return ReadingPace(min(step, float(np.mean(costs))), 0.0, step)
    deeper, token = np.polyfit(depths, costs, 1)
    if deeper <= 0 or token <= 0:
        return ReadingPace(float(np.mean(costs)), 0.0, step)
    return ReadingPace(float(token), float(deeper), step)


def _timed(decoder: Decoder, view: FullView | StreamingView, ids_T: Tensor) -> float:
    began = perf_counter()
    for logits_TV in read(decoder, view, ids_T):
        float(logits_TV[-1, 0])  # a device that computes is waited for
    return perf_counter() - began

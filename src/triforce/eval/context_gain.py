"""Gain from far context: loss on the same tokens with everything in sight, and with the last 2K only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triforce.eval.context import EvalContext, Text, grouped
from triforce.eval.scoring import cut_view, full_view, interval, nats
from triforce.eval.tables import Table, tokens
from triforce.eval.time_budget import ReadingForecast

LEAST = {"prose": 0.01, "code": 0.05}
"""Nats per token that a model with long-range attention gains at least (issue 3)."""

SIDES = {"model": "the model", "control": "control: attention cut"}


def measure(subject: EvalContext) -> dict[str, Any]:
    """Measure the model, and a control that must gain nothing: the model cut to its sinks and the last 2K."""
    plan = subject.plan
    windows = subject.windows(least=plan.far.stop)
    if not windows:
        return {"skipped": f"no text has {plan.far.stop:,} tokens"}
    seen = {"positions": [plan.far.start, plan.far.stop], "recent": plan.recent, "stride": plan.stride}
    sides: dict[str, Callable[[Text], Tensor]] = {
        "model": lambda window: subject.trace(window)[plan.far.start - 1 : plan.far.stop - 1],
        "control": lambda window: _cut(subject, window),
    }
    recent = [(window, _recent(subject, window)) for window in subject.steps(windows)]
    found = {side: [(w.kind, nats_N - far(w)) for w, nats_N in recent] for side, far in sides.items()}
    judged = {
        side: {kind: _verdict(kind, torch.cat(gains), plan.block) for kind, gains in grouped(of_side).items()}
        for side, of_side in found.items()
    }
    return seen | {"block": plan.block} | judged


def _recent(subject: EvalContext, window: Text) -> Tensor:
    """Return losses of tokens that see `recent` - `stride` + 1 to `recent` tokens before them."""
    plan = subject.plan
    view = full_view(subject.target, subject.plan.recent)
    losses = []
    first = plan.recent + 1 - plan.stride
    for stop in range(plan.far.start + plan.stride, plan.far.stop + 1, plan.stride):
        view.rewind(np.zeros_like(view.lengths_B))
        losses.append(nats(subject.target, view, window.ids_N[stop - plan.recent - 1 : stop], first))
    return torch.cat(losses)


def _cut(subject: EvalContext, window: Text) -> Tensor:
    far = subject.plan.far
    view = cut_view(subject.target, subject.plan.recent)
    return nats(subject.target, view, window.ids_N[: far.stop], far.start)


def _verdict(kind: str, gain_N: Tensor, block: int) -> dict[str, Any]:
    found = interval(gain_N, block)
    passes = found.mean >= LEAST[kind] and found.low > 0
    return asdict(found) | {"tokens": len(gain_N), "least": LEAST[kind], "passes": passes}


def seconds(subject: EvalContext, forecast: ReadingForecast) -> float:
    plan = subject.plan
    pace = forecast.target
    windows = subject.windows(least=plan.far.stop)
    recent = len(plan.far) // plan.stride * pace.reading(plan.recent)
    cut = plan.far.stop * (pace.token + pace.deeper * plan.recent)
    return forecast.traces(windows) + len(windows) * (recent + cut)


def tables(result: dict[str, Any]) -> list[Table]:
    rows = [
        [
            f"{kind}, {label}",
            f"{found['tokens']:,}",
            f"{found['mean']:+.4f}",
            f"{found['low']:+.4f} to {found['high']:+.4f}",
            f"{found['least']:.2f}",
            "yes" if found["passes"] else "no",
            f"{found['neighbours']:+.2f}",
        ]
        for side, label in SIDES.items()
        for kind, found in result[side].items()
    ]
    start, stop = map(tokens, result["positions"])
    recent = result["recent"]
    least = result["recent"] - result["stride"] + 1
    note = (
        f"Nats per token gained, at positions {start} to {stop}, by seeing everything before instead of the last "
        f"{least:,} to {recent:,} tokens. Intervals: 95 %, Student's over the mean differences of blocks of "
        f"{result['block']} tokens; they speak for more of these texts, not for other texts. The control keeps "
        f"its first tokens and the last ones, {recent:,} in all: it must not pass."
    )
    header = ["text", "tokens", "gain", "interval", "wanted", "passes", "r of neighbours"]
    return [Table("Gain from far context", note, header, rows)]

"""Gain from far context: loss of the same tokens with the whole context, and with the last 2K tokens only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triforce.eval.context import EvalContext, Text, group_by_kind
from triforce.eval.scoring import cut_view, full_view, interval, nats
from triforce.eval.time_budget import ReadingForecast
from triforce.tables import Table, tokens

LEAST_GAIN = {"prose": 0.01, "code": 0.05}
"""Least gain of a model with long-range attention, in nats per token."""

SIDES = {"model": "the model", "control": "control: attention cut"}


def measure(subject: EvalContext) -> dict[str, Any]:
    """Measure the model, and a control that must not gain: the same model cut to sinks and the last 2K tokens."""
    config = subject.config
    windows = subject.windows(min_tokens=config.far_positions.stop)
    if not windows:
        return {"skipped": f"no text has {config.far_positions.stop:,} tokens"}
    far = config.far_positions
    visible_tokens = {"positions": [far.start, far.stop], "recent": config.recent, "stride": config.stride}
    sides: dict[str, Callable[[Text], Tensor]] = {
        "model": lambda window: subject.trace(window)[config.far_positions.start - 1 : config.far_positions.stop - 1],
        "control": lambda window: _cut_losses(subject, window),
    }
    recent_losses = [(window, _recent_losses(subject, window)) for window in subject.with_progress(windows)]
    gains_by_side = {
        side: [(w.kind, nats_N - far_losses(w)) for w, nats_N in recent_losses] for side, far_losses in sides.items()
    }
    verdicts = {
        side: {
            kind: _verdict(kind, torch.cat(gains), config.block) for kind, gains in group_by_kind(side_gains).items()
        }
        for side, side_gains in gains_by_side.items()
    }
    return visible_tokens | {"block": config.block} | verdicts


def _recent_losses(subject: EvalContext, window: Text) -> Tensor:
    """Return losses of the far tokens, each given the `recent` - `stride` + 1 to `recent` tokens before it."""
    config = subject.config
    view = full_view(subject.target, subject.config.recent)
    losses = []
    first_scored = config.recent + 1 - config.stride
    for stop in range(config.far_positions.start + config.stride, config.far_positions.stop + 1, config.stride):
        view.rewind(np.zeros_like(view.lengths_B))
        losses.append(nats(subject.target, view, window.ids_N[stop - config.recent - 1 : stop], first_scored))
    return torch.cat(losses)


def _cut_losses(subject: EvalContext, window: Text) -> Tensor:
    far_positions = subject.config.far_positions
    view = cut_view(subject.target, subject.config.recent)
    return nats(subject.target, view, window.ids_N[: far_positions.stop], far_positions.start)


def _verdict(kind: str, gain_N: Tensor, block: int) -> dict[str, Any]:
    gain_interval = interval(gain_N, block)
    passes = gain_interval.mean >= LEAST_GAIN[kind] and gain_interval.low > 0
    return asdict(gain_interval) | {"tokens": len(gain_N), "least": LEAST_GAIN[kind], "passes": passes}


def seconds(subject: EvalContext, forecast: ReadingForecast) -> float:
    config = subject.config
    pace = forecast.target
    windows = subject.windows(min_tokens=config.far_positions.stop)
    recent = len(config.far_positions) // config.stride * pace.reading_seconds(config.recent)
    cut = config.far_positions.stop * (pace.token_seconds + pace.past_token_seconds * config.recent)
    return forecast.trace_seconds(windows) + len(windows) * (recent + cut)


def tables(result: dict[str, Any]) -> list[Table]:
    rows = [
        [
            f"{kind}, {label}",
            f"{kind_verdict['tokens']:,}",
            f"{kind_verdict['mean']:+.4f}",
            f"{kind_verdict['low']:+.4f} to {kind_verdict['high']:+.4f}",
            f"{kind_verdict['least']:.2f}",
            "yes" if kind_verdict["passes"] else "no",
            f"{kind_verdict['neighbours']:+.2f}",
        ]
        for side, label in SIDES.items()
        for kind, kind_verdict in result[side].items()
    ]
    start, stop = map(tokens, result["positions"])
    recent = result["recent"]
    least_recent = result["recent"] - result["stride"] + 1
    note = (
        f"Nats per token gained, at positions {start} to {stop}, by seeing everything before instead of the last "
        f"{least_recent:,} to {recent:,} tokens. Intervals: 95 %, Student's over the mean differences of blocks of "
        f"{result['block']} tokens. They hold for further tokens of these texts, not for other texts. The control "
        f"sees only the first tokens and the last ones, {recent:,} in all, so it must not pass."
    )
    header = ["text", "tokens", "gain", "interval", "wanted", "passes", "r of neighbours"]
    return [Table("Gain from far context", note, header, rows)]

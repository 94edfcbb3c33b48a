"""Copying: a span of an unseen text is repeated word by word, and the model should predict the repetition."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from triforce.eval.context import EvalContext, Text
from triforce.eval.scoring import full_view, read
from triforce.eval.time_budget import ReadingForecast
from triforce.kvcache import FullView
from triforce.tables import Table, percent, tokens

SPAN = 128
UNSCORED_TOKENS = 8
"""First tokens of a repetition, which show that it is one. They are not scored."""


def measure(subject: EvalContext) -> dict[str, Any]:
    """Return by distance the share of tokens predicted right in the repetition, and at their first occurrence."""
    hits = [_hits(subject, window) for window in subject.with_progress(subject.windows(max_windows=1))]
    distances = sorted({distance for window_hits in hits for distance in window_hits})
    if not distances:
        return {"skipped": f"no text has {2 * SPAN:,} tokens within the context"}
    rows = [
        _row(distance, [window_hits[distance] for window_hits in hits if distance in window_hits])
        for distance in distances
    ]
    return {"distances": rows}


def _row(distance: int, hits: list[Tensor]) -> dict[str, Any]:
    repeat_share, first_share = torch.cat(hits, 1).double().mean(1).tolist()
    return {
        "distance": distance,
        "tokens": sum(hit.shape[1] for hit in hits),
        "again": repeat_share,
        "first": first_share,
    }


def _hits(subject: EvalContext, window: Text) -> dict[int, Tensor]:
    """Return by distance which scored tokens are right, in the repetition and at first: bool (2, tokens)."""
    length = min(len(window.ids_N), subject.target.config.context - SPAN)
    ids_N = window.ids_N[:length]
    view = full_view(subject.target, length + SPAN)
    best_N = _greedy_ids(subject, view, ids_N)  # entry n is the token expected at n + 1
    hits_by_distance: dict[int, list[Tensor]] = {}
    for end in range(length, max(0, length - subject.config.copies * SPAN), -SPAN):
        for distance in _distances(end):
            view.rewind(np.full_like(view.lengths_B, end))
            start = end - distance
            span_T = ids_N[start : start + SPAN]
            scored = slice(UNSCORED_TOKENS, SPAN)
            again_T = _greedy_ids(subject, view, span_T)[UNSCORED_TOKENS - 1 : SPAN - 1] == span_T[scored]
            first_T = best_N[start + UNSCORED_TOKENS - 1 : start + SPAN - 1] == span_T[scored]
            hits_by_distance.setdefault(distance, []).append(torch.stack([again_T, first_T]).cpu())
    return {distance: torch.cat(hits, 1) for distance, hits in hits_by_distance.items()}


def _distances(end: int) -> list[int]:
    """Return distances up to `end`: powers of two from 1K, or from 128 in short contexts."""
    shortest = 1024 if end >= 4096 else SPAN
    return [shortest << n for n in range((end // shortest).bit_length())]


def _greedy_ids(subject: EvalContext, view: FullView, ids_T: Tensor) -> Tensor:
    return torch.cat([logits_TV.argmax(-1) for logits_TV in read(subject.target, view, ids_T)])


def seconds(subject: EvalContext, forecast: ReadingForecast) -> float:
    pace = forecast.target
    total = 0.0
    for window in subject.windows(max_windows=1):
        length = len(window.ids_N)
        repeat_seconds = subject.config.copies * len(_distances(length)) * pace.reading_seconds(length, length - SPAN)
        total += pace.reading_seconds(length) + repeat_seconds
    return total


def tables(result: dict[str, Any]) -> list[Table]:
    rows = [
        [tokens(row["distance"]), f"{row['tokens']:,}", percent(row["again"]), percent(row["first"])]
        for row in result["distances"]
    ]
    note = (
        f"A span of {SPAN} tokens is repeated at a distance. Share of its tokens, without the first {UNSCORED_TOKENS}, "
        "that are the most probable ones after the true text: in the repetition, and at their first occurrence."
    )
    return [Table("Copying", note, ["distance", "tokens", "the second time", "the first time"], rows)]

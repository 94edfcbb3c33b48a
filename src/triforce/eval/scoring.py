"""Losses of a text through a cache view: the forward passes of every measurement.

Shape suffixes: N tokens of a text, T tokens of one pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.arrays import to_host
from triforce.backends.decoder import Decoder
from triforce.backends.torch.tensors import as_tensor
from triforce.engine.tier_builder import ModelSet, SpeculativeConfig, TierBuilder
from triforce.kvcache import PAGE, FullView, StreamingView
from triforce.ragged import ints

WIDTH = 256
"""Tokens of a pass that returns logits. The limit bounds the memory of logits for any vocabulary."""


def full_view(decoder: Decoder, capacity: int) -> FullView:
    """Return the engine's full view for one text of at most `capacity` tokens."""
    return TierBuilder(ModelSet(decoder), SpeculativeConfig(), [capacity]).full_view()


def draft_view(decoder: Decoder) -> StreamingView:
    """Return the engine's view of a draft: sinks and a window."""
    return TierBuilder(ModelSet(decoder, decoder), SpeculativeConfig(), [0]).draft_model_tier().cache


def cut_view(decoder: Decoder, recent: int) -> StreamingView:
    """Return a view of `recent` tokens: attention sinks, without which no model works, and the last tokens."""
    config = decoder.config
    device = decoder.device
    return StreamingView(config, 1, PAGE, recent - PAGE, slack=WIDTH, dtype=decoder.dtype, device=device)


def prefill(decoder: Decoder, view: FullView | StreamingView, ids_N: Tensor) -> None:
    """Feed a text to a view as the engine prefills a prompt: without logits, in the steps of `view.resume`."""
    while True:
        start, stop = view.resume(len(ids_N))
        if start >= stop:
            return
        _pass(decoder, view, ids_N[start:stop], scored=False)


def read(decoder: Decoder, view: FullView | StreamingView, ids_T: Tensor) -> Iterator[Tensor]:
    """Feed the next tokens of a view's text; yield the logits after each token, (T, V) for each pass."""
    for part_T in parts(ids_T, _width(view)):
        yield _pass(decoder, view, part_T, scored=True)[0]


def nats(decoder: Decoder, view: FullView | StreamingView, ids_N: Tensor, first_scored: int = 1) -> Tensor:
    """Return the loss in nats of a text's tokens from `first_scored` on: float32 (M), M = N - `first_scored`.

    The result is on the CPU. The text must be new to the view. Tokens before `first_scored` - 1 are fed without logits.
    """
    prefill(decoder, view, ids_N[: first_scored - 1])
    logits_and_labels = zip(
        read(decoder, view, ids_N[first_scored - 1 : -1]), parts(ids_N[first_scored:], _width(view)), strict=True
    )
    return torch.cat(
        [F.cross_entropy(logits_TV, labels_T, reduction="none").cpu() for logits_TV, labels_T in logits_and_labels]
    )


def greedy(decoder: Decoder, view: FullView, ids_T: Tensor, count: int) -> list[int]:
    """Return the `count` greedy tokens after `ids_T`. The view is rewound to its length before the call."""
    start_lengths_B = view.lengths_B.copy()
    greedy_ids = []
    for _ in range(count):
        *_, logits_TV = read(decoder, view, ids_T)
        ids_T = logits_TV[-1:].argmax(-1)
        greedy_ids.append(int(ids_T))
    view.rewind(start_lengths_B)
    return greedy_ids


def parts(ids_N: Tensor, width: int) -> list[Tensor]:
    """Split tokens into parts of `width`. The last part may be shorter."""
    return [ids_N[start : start + width] for start in range(0, len(ids_N), width)]


def _width(view: FullView | StreamingView) -> int:
    return min(WIDTH, view.slack) if isinstance(view, StreamingView) else WIDTH


def _pass(decoder: Decoder, view: FullView | StreamingView, ids_T: Tensor, scored: bool) -> Tensor:
    columns_1J = None if scored else np.empty((1, 0), np.int64)
    return as_tensor(decoder(to_host(ids_T[None]), ints([len(ids_T)]), view, columns_1J))


NORMAL = 1.959963984540054  # 97.5 % of a normal variable lie below
ONE_SIDED = 1.6448536269514722  # 95 % of a normal variable lie below


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % confidence interval from `low` to `high`, over `blocks` means of blocks."""

    mean: float
    low: float
    high: float
    blocks: int
    neighbours: float
    """Correlation of neighbouring blocks. It is near zero if the blocks are long enough to be independent."""


def interval(values_N: Tensor, block: int) -> Interval:
    """Return Student's 95 % interval over the means of blocks of `block` values. At least two blocks are needed."""
    means_M = values_N[: len(values_N) // block * block].view(-1, block).double().mean(1)
    count = len(means_M)
    mean = means_M.mean().item()
    half_width = student(count - 1) * means_M.std().item() / sqrt(count)
    deviations_M = means_M - mean
    neighbours = (deviations_M[1:] * deviations_M[:-1]).sum() / deviations_M.square().sum().clamp_min(1e-30)
    return Interval(mean, mean - half_width, mean + half_width, count, neighbours.item())


def student(freedom: int, z: float = NORMAL) -> float:
    """Return the quantile of Student's t at the probability of the normal quantile `z`, by default 97.5 %.

    The formula is the expansion of Cornish and Fisher (Abramowitz and Stegun 26.7.5).
    """
    v = float(freedom)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + (z**3 + z) / 4 / v + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / v**2 + third / v**3

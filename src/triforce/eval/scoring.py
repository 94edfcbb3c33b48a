"""Losses of a text through a cache view: the passes that every measurement is made of.

Shape suffixes: N tokens of a text, T tokens of one pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.backends.decoder import Decoder
from triforce.engine.tier_builder import ModelSet, SpeculativeConfig, TierBuilder
from triforce.kvcache import PAGE, FullView, StreamingView
from triforce.ragged import ints

WIDTH = 256
"""Tokens of a pass whose logits are wanted: it bounds their memory, whatever the vocabulary."""


def full_view(decoder: Decoder, capacity: int) -> FullView:
    """Return the exact view of one text of at most `capacity` tokens, as the engine has it."""
    return TierBuilder(ModelSet(decoder), SpeculativeConfig(), [capacity]).full()


def draft_view(decoder: Decoder) -> StreamingView:
    """Return the view that the engine gives to a draft: sinks and a window."""
    return TierBuilder(ModelSet(decoder, decoder), SpeculativeConfig(), [0]).draft_model().cache


def cut_view(decoder: Decoder, recent: int) -> StreamingView:
    """Return a view of `recent` tokens: attention sinks, without which no model works, and the last ones."""
    config = decoder.config
    device = decoder.device
    return StreamingView(config, 1, PAGE, recent - PAGE, slack=WIDTH, dtype=decoder.dtype, device=device)


def prefill(decoder: Decoder, view: FullView | StreamingView, ids_N: Tensor) -> None:
    """Let a view see a text, as the engine reads a prompt: without logits, and in the steps that the view asks for."""
    while True:
        start, stop = view.resume(len(ids_N))
        if start >= stop:
            return
        _pass(decoder, view, ids_N[start:stop], scored=False)


def read(decoder: Decoder, view: FullView | StreamingView, ids_T: Tensor) -> Iterator[Tensor]:
    """Feed the tokens that follow what the view has seen; yield the logits (T, V) after each, pass by pass."""
    for part_T in parts(ids_T, _width(view)):
        yield _pass(decoder, view, part_T, scored=True)[0]


def nats(decoder: Decoder, view: FullView | StreamingView, ids_N: Tensor, first_scored: int = 1) -> Tensor:
    """Return the loss in nats of a text's tokens from `first_scored` on: float32 (N - first_scored), on the CPU.

    The text is new to the view. The tokens before `first_scored` - 1 are prefilled without logits.
    """
    prefill(decoder, view, ids_N[: first_scored - 1])
    logits_and_labels = zip(
        read(decoder, view, ids_N[first_scored - 1 : -1]), parts(ids_N[first_scored:], _width(view)), strict=True
    )
    return torch.cat(
        [F.cross_entropy(logits_TV, labels_T, reduction="none").cpu() for logits_TV, labels_T in logits_and_labels]
    )


def greedy(decoder: Decoder, view: FullView, ids_T: Tensor, count: int) -> list[int]:
    """Feed tokens, then the `count` - 1 most probable ones after them; return these, and rewind the view."""
    start_lengths_B = view.lengths_B.copy()
    greedy_ids = []
    for _ in range(count):
        *_, logits_TV = read(decoder, view, ids_T)
        ids_T = logits_TV[-1:].argmax(-1)
        greedy_ids.append(int(ids_T))
    view.rewind(start_lengths_B)
    return greedy_ids


def parts(ids_N: Tensor, width: int) -> list[Tensor]:
    """Return parts of `width` tokens; the last may be shorter."""
    return [ids_N[start : start + width] for start in range(0, len(ids_N), width)]


def _width(view: FullView | StreamingView) -> int:
    return min(WIDTH, view.slack) if isinstance(view, StreamingView) else WIDTH


def _pass(decoder: Decoder, view: FullView | StreamingView, ids_T: Tensor, scored: bool) -> Tensor:
    count_1 = ints([len(ids_T)])
    return decoder(ids_T[None], count_1, view, None if scored else ids_T.new_zeros(1, 0))


NORMAL = 1.959963984540054  # 97.5 % of a normal variable lie below
ONE_SIDED = 1.6448536269514722  # 95 % do


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float
    blocks: int
    neighbours: float
    """Correlation of neighbouring blocks: near zero if the blocks are long enough to count as independent."""


def interval(values_N: Tensor, block: int) -> Interval:
    """Return Student's 95 % interval over the means of blocks of `block` tokens, at least two of them."""
    means_M = values_N[: len(values_N) // block * block].view(-1, block).double().mean(1)
    count = len(means_M)
    mean = means_M.mean().item()
    half_width = student(count - 1) * means_M.std().item() / sqrt(count)
    deviations_M = means_M - mean
    neighbours = (deviations_M[1:] * deviations_M[:-1]).sum() / deviations_M.square().sum().clamp_min(1e-30)
    return Interval(mean, mean - half_width, mean + half_width, count, neighbours.item())


def student(freedom: int, z: float = NORMAL) -> float:
    """Return the point of Student's t that is `z` of a normal variable, usually that of 97.5 %.

    By the expansion of Cornish and Fisher (Abramowitz and Stegun 26.7.5).
    """
    v = float(freedom)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + (z**3 + z) / 4 / v + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / v**2 + third / v**3

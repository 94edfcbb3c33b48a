"""Held-out acceptance of a draft, guess by guess in a row, on texts and on the target's answers.

Share j is that of guesses kept where the j - 1 before them were. Shape suffixes as in distillation.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triforce.backends.decoder import Decoder
from triforce.eagle.torch_passes import FeatureLayer
from triforce.eval.agreement import same_pick
from triforce.training.distillation import Head, Past, guesses
from triforce.training.episodes import Chunk, TargetStream

SAMPLED = 0.8
"""The temperature of the seeded shares."""
APART = 8
"""Only every so many places are looked at where laws of the whole vocabulary are compared."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A draft as it is looked at: its layer, the head, and the tokens of its rows."""

    layer: FeatureLayer
    head: Head
    tokens_M: Tensor


class Heldout:
    """Texts (B, T) by their kind, read by the target once: greedy shares of any draft for it are quick then."""

    def __init__(self, decoder: Decoder, layers: tuple[int, ...], texts: Mapping[str, Tensor]) -> None:
        self.read = {
            kind: [_best(TargetStream(decoder, layers, *ids_1T.shape).read(ids_1T, logits=True))
                   for ids_1T in torch.split(ids_BT, 1)]
            for kind, ids_BT in texts.items()
        }  # fmt: skip

    def greedy(self, subject: Subject, steps: int) -> dict[str, list[float]]:
        """Return the shares that are kept at temperature 0, by kind."""
        means = {
            kind: torch.tensor([greedy(subject, chunk, best_1T, Past(), steps) for chunk, best_1T in chunks]).mean(0)
            for kind, chunks in self.read.items()
        }
        return {kind: mean.tolist() for kind, mean in means.items()}


def _best(chunk: Chunk) -> tuple[Chunk, Tensor]:
    """Return a chunk without its logits, and the most probable token behind each of its own."""
    assert chunk.logits_BTV is not None
    return replace(chunk, logits_BTV=None), chunk.logits_BTV.argmax(-1)


@torch.no_grad()
def greedy(subject: Subject, chunk: Chunk, best_BT: Tensor, past: Past, steps: int) -> list[float]:
    """Return the share of guesses in a chunk that are the target's most probable token."""
    anchors_N = torch.arange(chunk.ids_BT.shape[1] - steps + 1)
    return [
        float((subject.tokens_M[subject.head.logits(out_BNC).argmax(-1)] == best_BT[:, at_N]).float().mean())
        for out_BNC, at_N in guesses(subject.layer, chunk, past, anchors_N, steps)
    ]


@torch.no_grad()
def seeded(subject: Subject, chunk: Chunk, past: Past, steps: int) -> list[float]:
    """Return the probability that draft and target draw the same token at temperature 0.8, in the mean of a chunk."""
    assert chunk.logits_BTV is not None
    anchors_N, shares = torch.arange(0, chunk.ids_BT.shape[1] - steps + 1, APART), []
    for out_BNC, at_N in guesses(subject.layer, chunk, past, anchors_N, steps):
        p_PV = (chunk.logits_BTV[:, at_N].flatten(0, 1) / SAMPLED).softmax(-1).double()
        q_PV = torch.zeros_like(p_PV)
        q_PV[:, subject.tokens_M] = (subject.head.logits(out_BNC).flatten(0, 1) / SAMPLED).softmax(-1).double()
        shares.append(float(same_pick(p_PV, q_PV).mean()))
    return shares


def at_length(
    decoder: Decoder,
    layers: tuple[int, ...],
    subject: Subject,
    ids_BL: Tensor,
    width: int,
    steps: int,
    tail: int | None = None,
) -> dict[str, list[float]]:
    """Return both kinds of shares in the last `tail` tokens of texts, all of which the target sees.

    width: tokens of a chunk before them. tail: as many, if it is not given.
    """
    greedy_sums, seeded_sums = torch.zeros(steps), torch.zeros(steps)
    for ids_1L in torch.split(ids_BL, 1):  # one by one: a chunk's logits are large
        for chunk, past in _chunks(decoder, layers, subject, ids_1L, width, tail or width):
            greedy_sums += torch.tensor(greedy(subject, *_best(chunk), copy(past), steps))
            seeded_sums += torch.tensor(seeded(subject, chunk, past, steps))
    return {"0": (greedy_sums / len(ids_BL)).tolist(), f"{SAMPLED:g}": (seeded_sums / len(ids_BL)).tolist()}


def _chunks(
    decoder: Decoder, layers: tuple[int, ...], subject: Subject, ids_1L: Tensor, width: int, tail: int
) -> Iterator[tuple[Chunk, Past]]:
    """Read a text, and yield its last chunk and what came before it."""
    stream, past = TargetStream(decoder, layers, *ids_1L.shape), Past()
    before_1N, last = ids_1L[:, :-tail], ids_1L[:, -tail:]
    for part in torch.split(before_1N, width, 1) if before_1N.shape[1] else ():
        with torch.no_grad():
            for _ in guesses(subject.layer, stream.read(part), past, torch.zeros(1, dtype=torch.long), 1):
                pass
    yield stream.read(last, logits=True), past

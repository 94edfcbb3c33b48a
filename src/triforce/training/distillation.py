"""Distillation of the target's law into guesses in a row, each made of the one before.

The draft learns on its own guesses of states: those behind the first one are its outputs (training-time test, Li et
al. 2025, arXiv 2503.01840, section 3). Tokens are those of the text, as a guess goes on only where it was right.

Shape suffixes as in eagle/head.py; B rows, T tokens of a chunk, N anchors, P = B * N.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from triforce.backends.decoder import Decoder
from triforce.backends.torch.attention import capped
from triforce.backends.torch.model import norm
from triforce.eagle.torch_passes import EagleHeadLayer, Entries
from triforce.eval.agreement import same_pick
from triforce.training.episodes import Chunk, TargetStream

SLICE = 256
"""Positions whose logits exist at once."""


@dataclass(frozen=True, slots=True)
class Head:
    """The target's last norm, and the rows of its head for the tokens that can be proposed, in the type of products."""

    norm_C: Tensor
    eps: float
    rows_MC: Tensor
    cap: float = 0.0
    """Of the target's logits; 0: none."""
    greedy: float = 0.0
    """Share of the target's most probable token among these in what is taught, beside its law."""

    def law(self, final_NC: Tensor) -> Tensor:
        """Return the target's law among these tokens (N, M), of its states behind the last layer."""
        return capped(self.logits(norm(final_NC, self.norm_C, self.eps)), self.cap).softmax(-1)

    def taught(self, final_NC: Tensor) -> Tensor:
        """Return what a draft learns to say (N, M): the law, and more of its most probable token."""
        law_NM = self.law(final_NC)
        best_N1 = law_NM.argmax(-1, keepdim=True)
        return law_NM.mul_(1 - self.greedy).scatter_add_(-1, best_N1, torch.full(best_N1.shape, self.greedy))

    def logits(self, out_NC: Tensor) -> Tensor:
        """Return float32 logits (..., M) of outputs (..., C)."""
        return (out_NC.to(self.rows_MC.dtype) @ self.rows_MC.T).float()


class Past:
    """The entries before a chunk that its own may see: sinks, and a window."""

    def __init__(self) -> None:
        self.entries: Entries | None = None

    def then(self, own: Entries) -> Entries:
        """Return these and those of a chunk."""
        return self.entries.then(own) if self.entries else own

    def keep(self, seen: Entries, sinks: int, window: int) -> None:
        """Keep what the chunk behind `seen` may see."""
        slots_K = seen.slots_BK[0]
        kept_K = (slots_K < sinks) | (slots_K > slots_K[-1] - window)
        self.entries = Entries(*(part[:, kept_K].detach() for part in seen))


def guesses(
    layer: EagleHeadLayer, chunk: Chunk, past: Past, anchors_N: Tensor, steps: int, later_N: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs (B, N, C) for the head, guess by guess in a row, and where in the chunk (N) its token stands.

    The first guess of a row is made of the entry of its anchor. later_N: which of the anchors go on behind it, all
    without. The chunk's own entries are then kept in `past`.
    """
    fused_BTC = layer.fuse(chunk.states_BTX)
    seen = past.then(layer.entries(fused_BTC, chunk.embeddings_BTC, chunk.slots_BT))
    fused_BNC = fused_BTC[:, anchors_N]
    last_BN = chunk.slots_BT[:, anchors_N]
    chain = list[Entries]()
    for step in range(steps):
        if step == 1 and later_N is not None:
            anchors_N = anchors_N[later_N]
            fused_BNC = fused_BNC[:, later_N]
            last_BN = last_BN[:, later_N]
        at_N = anchors_N + step
        embeddings_BNC = chunk.embeddings_BTC[:, at_N]
        slots_BN = chunk.slots_BT[:, at_N]
        out_BNC, fused_BNC, own = layer.step(fused_BNC, embeddings_BNC, slots_BN, seen, last_BN, chain)
        chain += [own] if step else []
        yield out_BNC, at_N
    past.keep(seen, layer.config.sinks, layer.config.window)


def loss(layer: EagleHeadLayer, head: Head, chunk: Chunk, past: Past, later_N: Tensor, steps: int,
         decay: float) -> Tensor:  # fmt: skip
    """Return the cross entropy of guesses and what the head teaches in nats, weighted by `decay` per guess: a scalar.

    All tokens of the chunk are guessed behind; from those of `later_N` guesses go on.
    """
    total = torch.zeros(())
    weight = 0.0
    anchors_N = torch.arange(chunk.ids_BT.shape[1])
    for step, (out_BNC, at_N) in enumerate(guesses(layer, chunk, past, anchors_N, steps, later_N)):
        final_PC = chunk.final_BTC[:, at_N].flatten(0, 1)
        nats: Tensor = _HeadLoss.apply(out_BNC.flatten(0, 1), head, final_PC)  # type: ignore[no-untyped-call]
        total = total + decay**step * nats / len(final_PC)
        weight = weight + decay**step
    return total / weight


class _HeadLoss(torch.autograd.Function):
    """The sum of -p log q over tokens that can be proposed, and its gradient, a slice of positions at a time.

    The law is that among these tokens: the gradient of a guess is the difference of the two.
    """

    @staticmethod
    def forward(ctx: Any, out_PC: Tensor, head: Head, final_PC: Tensor) -> Tensor:
        total = torch.zeros(())
        slopes = []
        for some_PC, finals_PC in zip(torch.split(out_PC.detach(), SLICE), torch.split(final_PC, SLICE), strict=True):
            law_PM = head.taught(finals_PC)
            log_q_PM = head.logits(some_PC).log_softmax(-1)
            total = total - (law_PM * log_q_PM).sum()
            slope_PM = log_q_PM.exp_().sub_(law_PM)
            slopes.append((slope_PM.to(head.rows_MC.dtype) @ head.rows_MC).float())
        ctx.save_for_backward(torch.cat(slopes))
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        (slope_PC,) = ctx.saved_tensors
        return slope_PC * scale, None, None


SAMPLED = 0.8
"""The temperature of the seeded shares."""
APART = 8
"""Only every so many places are looked at where laws of the whole vocabulary are compared."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A draft as it is looked at: its layer, the head, and the tokens of its rows."""

    layer: EagleHeadLayer
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
    anchors_N = torch.arange(0, chunk.ids_BT.shape[1] - steps + 1, APART)
    shares = []
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
    greedy_sums = torch.zeros(steps)
    seeded_sums = torch.zeros(steps)
    for ids_1L in torch.split(ids_BL, 1):  # one by one: a chunk's logits are large
        for chunk, past in _chunks(decoder, layers, subject, ids_1L, width, tail or width):
            greedy_sums += torch.tensor(greedy(subject, *_best(chunk), copy(past), steps))
            seeded_sums += torch.tensor(seeded(subject, chunk, past, steps))
    return {"0": (greedy_sums / len(ids_BL)).tolist(), f"{SAMPLED:g}": (seeded_sums / len(ids_BL)).tolist()}


def _chunks(
    decoder: Decoder, layers: tuple[int, ...], subject: Subject, ids_1L: Tensor, width: int, tail: int
) -> Iterator[tuple[Chunk, Past]]:
    """Read a text, and yield its last chunk and what came before it."""
    stream = TargetStream(decoder, layers, *ids_1L.shape)
    past = Past()
    before_1N = ids_1L[:, :-tail]
    last = ids_1L[:, -tail:]
    for part in torch.split(before_1N, width, 1) if before_1N.shape[1] else ():
        with torch.no_grad():
            for _ in guesses(subject.layer, stream.read(part), past, torch.zeros(1, dtype=torch.long), 1):
                pass
    yield stream.read(last, logits=True), past

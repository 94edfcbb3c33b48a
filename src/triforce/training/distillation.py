"""Distillation of the target's law into guesses in a row, each made of the one before.

The draft learns on its own guesses of states: those behind the first one are its outputs (training-time test, Li et
al. 2025, arXiv 2503.01840, section 3). Tokens are those of the text, as a guess goes on only where it was right.

Shape suffixes as in eagle/head.py; B rows, T tokens of a chunk, N anchors, P = B * N.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triforce.backends.torch.attention import capped
from triforce.backends.torch.model import norm
from triforce.eagle.torch_passes import Entries, FeatureLayer
from triforce.training.episodes import Chunk

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
    layer: FeatureLayer, chunk: Chunk, past: Past, anchors_N: Tensor, steps: int, later_N: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs (B, N, C) for the head, guess by guess in a row, and where in the chunk (N) its token stands.

    The first guess of a row is made of the entry of its anchor. later_N: which of the anchors go on behind it, all
    without. The chunk's own entries are then kept in `past`.
    """
    fused_BTC = layer.fuse(chunk.states_BTX)
    seen = past.then(layer.entries(fused_BTC, chunk.embeddings_BTC, chunk.slots_BT))
    fused_BNC, last_BN, chain = fused_BTC[:, anchors_N], chunk.slots_BT[:, anchors_N], list[Entries]()
    for step in range(steps):
        if step == 1 and later_N is not None:
            anchors_N, fused_BNC, last_BN = anchors_N[later_N], fused_BNC[:, later_N], last_BN[:, later_N]
        at_N = anchors_N + step
        embeddings_BNC, slots_BN = chunk.embeddings_BTC[:, at_N], chunk.slots_BT[:, at_N]
        out_BNC, fused_BNC, own = layer.step(fused_BNC, embeddings_BNC, slots_BN, seen, last_BN, chain)
        chain += [own] if step else []
        yield out_BNC, at_N
    past.keep(seen, layer.config.sinks, layer.config.window)


def loss(layer: FeatureLayer, head: Head, chunk: Chunk, past: Past, later_N: Tensor, steps: int,
         decay: float) -> Tensor:  # fmt: skip
    """Return the cross entropy of guesses and what the head teaches in nats, weighted by `decay` per guess: a scalar.

    All tokens of the chunk are guessed behind; from those of `later_N` guesses go on.
    """
    total, weight, anchors_N = torch.zeros(()), 0.0, torch.arange(chunk.ids_BT.shape[1])
    for step, (out_BNC, at_N) in enumerate(guesses(layer, chunk, past, anchors_N, steps, later_N)):
        final_PC = chunk.final_BTC[:, at_N].flatten(0, 1)
        nats: Tensor = _HeadLoss.apply(out_BNC.flatten(0, 1), head, final_PC)  # type: ignore[no-untyped-call]
        total, weight = total + decay**step * nats / len(final_PC), weight + decay**step
    return total / weight


class _HeadLoss(torch.autograd.Function):
    """The sum of -p log q over tokens that can be proposed, and its gradient, a slice of positions at a time.

    The law is that among these tokens: the gradient of a guess is the difference of the two.
    """

    @staticmethod
    def forward(ctx: Any, out_PC: Tensor, head: Head, final_PC: Tensor) -> Tensor:
        total, slopes = torch.zeros(()), []
        for some_PC, finals_PC in zip(torch.split(out_PC.detach(), SLICE), torch.split(final_PC, SLICE), strict=True):
            law_PM, log_q_PM = head.taught(finals_PC), head.logits(some_PC).log_softmax(-1)
            total = total - (law_PM * log_q_PM).sum()
            slope_PM = log_q_PM.exp_().sub_(law_PM)
            slopes.append((slope_PM.to(head.rows_MC.dtype) @ head.rows_MC).float())
        ctx.save_for_backward(torch.cat(slopes))
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        (slope_PC,) = ctx.saved_tensors
        return slope_PC * scale, None, None

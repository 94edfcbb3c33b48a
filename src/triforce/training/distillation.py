"""Distillation of the target's distribution into consecutive draft tokens, each computed from the one before.

The draft trains on its own estimates of states: after the first draft token, states are its outputs (training-time
test, Li et al. 2025, arXiv 2503.01840, section 3). The tokens that it reads are those of the text, because a verified
draft token equals the text's token.

Anchor: a position of a chunk at which drafting begins.
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
"""Positions whose logits are in memory at one time."""


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The target's last norm, and the rows of its head for the proposable tokens, in the dtype of the products."""

    norm_C: Tensor
    eps: float
    rows_MC: Tensor
    cap: float = 0.0
    """Soft cap of the target's logits; 0: none."""
    greedy_weight: float = 0.0
    """Weight of the target's most probable proposable token in the training probabilities; the rest is `probs`."""

    def probs(self, final_NC: Tensor) -> Tensor:
        """Return the target's probabilities of the proposable tokens (N, M). final_NC: states after the last layer."""
        return capped(self.logits(norm(final_NC, self.norm_C, self.eps)), self.cap).softmax(-1)

    def training_probs(self, final_NC: Tensor) -> Tensor:
        """Return the probabilities that a draft learns (N, M): `probs` with more weight on the most probable token."""
        probs_NM = self.probs(final_NC)
        best_N1 = probs_NM.argmax(-1, keepdim=True)
        weights_N1 = torch.full(best_N1.shape, self.greedy_weight)
        return probs_NM.mul_(1 - self.greedy_weight).scatter_add_(-1, best_N1, weights_N1)

    def logits(self, out_NC: Tensor) -> Tensor:
        """Return float32 logits (..., M) for outputs (..., C)."""
        return (out_NC.to(self.rows_MC.dtype) @ self.rows_MC.T).float()


class PastEntries:
    """Entries before a chunk that the chunk may attend to: sinks and a window."""

    def __init__(self) -> None:
        self.entries: Entries | None = None

    def with_chunk(self, chunk_entries: Entries) -> Entries:
        """Return the past entries followed by those of a chunk."""
        return self.entries.followed_by(chunk_entries) if self.entries else chunk_entries

    def keep_visible(self, visible_entries: Entries, sinks: int, window: int) -> None:
        """Keep the entries that the chunk after `visible_entries` may attend to."""
        slots_K = visible_entries.slots_BK[0]
        visible_K = (slots_K < sinks) | (slots_K > slots_K[-1] - window)
        self.entries = Entries(*(part[:, visible_K].detach() for part in visible_entries))


def draft_outputs(
    layer: EagleHeadLayer,
    chunk: Chunk,
    past: PastEntries,
    anchors_N: Tensor,
    steps: int,
    continued_N: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each of `steps` draft tokens its outputs (B, N, C), and the positions (N) after which it is proposed.

    The first draft token is computed from the entry of its anchor. continued_N: indices of the anchors at which
    drafting continues after the first draft token; None: all. At the end `past` keeps the chunk's entries.
    """
    fused_BTC = layer.fuse(chunk.states_BTX)
    visible_entries = past.with_chunk(layer.entries(fused_BTC, chunk.embeddings_BTC, chunk.slots_BT))
    fused_BNC = fused_BTC[:, anchors_N]
    anchor_slots_BN = chunk.slots_BT[:, anchors_N]
    chain = list[Entries]()
    for step in range(steps):
        if step == 1 and continued_N is not None:
            anchors_N = anchors_N[continued_N]
            fused_BNC = fused_BNC[:, continued_N]
            anchor_slots_BN = anchor_slots_BN[:, continued_N]
        positions_N = anchors_N + step
        embeddings_BNC = chunk.embeddings_BTC[:, positions_N]
        slots_BN = chunk.slots_BT[:, positions_N]
        out_BNC, fused_BNC, step_entries = layer.step(
            fused_BNC, embeddings_BNC, slots_BN, visible_entries, anchor_slots_BN, chain
        )
        chain += [step_entries] if step else []
        yield out_BNC, positions_N
    past.keep_visible(visible_entries, layer.config.sinks, layer.config.window)


def loss(layer: EagleHeadLayer, head: OutputHead, chunk: Chunk, past: PastEntries, continued_N: Tensor, steps: int,
         decay: float) -> Tensor:  # fmt: skip
    """Return the cross entropy of draft tokens and the head's training probabilities: a scalar in nats.

    Draft token n has weight `decay` ** n. Every token of the chunk is an anchor. Drafting continues after the first
    draft token at the anchors `continued_N`.
    """
    total = torch.zeros(())
    weight = 0.0
    anchors_N = torch.arange(chunk.ids_BT.shape[1])
    for step, (out_BNC, positions_N) in enumerate(draft_outputs(layer, chunk, past, anchors_N, steps, continued_N)):
        final_PC = chunk.final_BTC[:, positions_N].flatten(0, 1)
        nats: Tensor = _HeadLoss.apply(out_BNC.flatten(0, 1), head, final_PC)  # type: ignore[no-untyped-call]
        total = total + decay**step * nats / len(final_PC)
        weight = weight + decay**step
    return total / weight


class _HeadLoss(torch.autograd.Function):
    """Sum of -p log q over the proposable tokens, with its gradient, computed a slice of positions at a time.

    p and q are normalized over these tokens, so the gradient with respect to a draft token's logits is q - p.
    """

    @staticmethod
    def forward(ctx: Any, out_PC: Tensor, head: OutputHead, final_PC: Tensor) -> Tensor:
        total = torch.zeros(())
        slopes = []
        for slice_PC, finals_PC in zip(torch.split(out_PC.detach(), SLICE), torch.split(final_PC, SLICE), strict=True):
            probs_PM = head.training_probs(finals_PC)
            log_q_PM = head.logits(slice_PC).log_softmax(-1)
            total = total - (probs_PM * log_q_PM).sum()
            slope_PM = log_q_PM.exp_().sub_(probs_PM)
            slopes.append((slope_PM.to(head.rows_MC.dtype) @ head.rows_MC).float())
        ctx.save_for_backward(torch.cat(slopes))
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        (slope_PC,) = ctx.saved_tensors
        return slope_PC * scale, None, None


SAMPLED_TEMPERATURE = 0.8
"""Temperature of `seeded_shares`."""
STRIDE = 8
"""Step between positions at which distributions over the whole vocabulary are compared."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A draft under evaluation: its layer, the head, and the tokens of the head's rows."""

    layer: EagleHeadLayer
    head: OutputHead
    tokens_M: Tensor


class Heldout:
    """Held-out texts (B, T) by kind. The target prefills them once, for all evaluations of a draft in training."""

    def __init__(self, decoder: Decoder, layers: tuple[int, ...], texts: Mapping[str, Tensor]) -> None:
        self.chunks_by_kind = {
            kind: [_with_greedy_ids(TargetStream(decoder, layers, *ids_1T.shape).read(ids_1T, logits=True))
                   for ids_1T in torch.split(ids_BT, 1)]
            for kind, ids_BT in texts.items()
        }  # fmt: skip

    def greedy_shares(self, subject: Subject, steps: int) -> dict[str, list[float]]:
        """Return by kind of text, for each draft token, the share accepted at temperature 0."""
        means = {
            kind: torch.tensor(
                [greedy_shares(subject, chunk, best_1T, PastEntries(), steps) for chunk, best_1T in chunks]
            ).mean(0)
            for kind, chunks in self.chunks_by_kind.items()
        }
        return {kind: mean.tolist() for kind, mean in means.items()}


def _with_greedy_ids(chunk: Chunk) -> tuple[Chunk, Tensor]:
    """Return a chunk without its logits, and the most probable next token after each position."""
    assert chunk.logits_BTV is not None
    return replace(chunk, logits_BTV=None), chunk.logits_BTV.argmax(-1)


@torch.no_grad()
def greedy_shares(subject: Subject, chunk: Chunk, best_BT: Tensor, past: PastEntries, steps: int) -> list[float]:
    """Return for each draft token the share of positions of a chunk where it is the target's most probable token."""
    anchors_N = torch.arange(chunk.ids_BT.shape[1] - steps + 1)
    return [
        float((subject.tokens_M[subject.head.logits(out_BNC).argmax(-1)] == best_BT[:, positions_N]).float().mean())
        for out_BNC, positions_N in draft_outputs(subject.layer, chunk, past, anchors_N, steps)
    ]


@torch.no_grad()
def seeded_shares(subject: Subject, chunk: Chunk, past: PastEntries, steps: int) -> list[float]:
    """Return for each draft token the mean probability that draft and target draw the same token.

    The temperature is `SAMPLED_TEMPERATURE`.
    """
    assert chunk.logits_BTV is not None
    anchors_N = torch.arange(0, chunk.ids_BT.shape[1] - steps + 1, STRIDE)
    shares = []
    for out_BNC, positions_N in draft_outputs(subject.layer, chunk, past, anchors_N, steps):
        p_PV = (chunk.logits_BTV[:, positions_N].flatten(0, 1) / SAMPLED_TEMPERATURE).softmax(-1).double()
        q_PV = torch.zeros_like(p_PV)
        q_PV[:, subject.tokens_M] = (
            (subject.head.logits(out_BNC).flatten(0, 1) / SAMPLED_TEMPERATURE).softmax(-1).double()
        )
        shares.append(float(same_pick(p_PV, q_PV).mean()))
    return shares


def shares_at_length(
    decoder: Decoder,
    layers: tuple[int, ...],
    subject: Subject,
    ids_BL: Tensor,
    width: int,
    steps: int,
    tail: int | None = None,
) -> dict[str, list[float]]:
    """Return greedy and seeded shares in the last `tail` tokens of texts. The target sees the whole texts.

    width: tokens of a chunk before the tail. tail: `width` if None. The result's keys are temperatures.
    """
    greedy_sums = torch.zeros(steps)
    seeded_sums = torch.zeros(steps)
    for ids_1L in torch.split(ids_BL, 1):  # one text at a time, because a chunk's logits are large
        for chunk, past in _chunks(decoder, layers, subject, ids_1L, width, tail or width):
            greedy_sums += torch.tensor(greedy_shares(subject, *_with_greedy_ids(chunk), copy(past), steps))
            seeded_sums += torch.tensor(seeded_shares(subject, chunk, past, steps))
    return {"0": (greedy_sums / len(ids_BL)).tolist(), f"{SAMPLED_TEMPERATURE:g}": (seeded_sums / len(ids_BL)).tolist()}


def _chunks(
    decoder: Decoder, layers: tuple[int, ...], subject: Subject, ids_1L: Tensor, width: int, tail: int
) -> Iterator[tuple[Chunk, PastEntries]]:
    """Prefill a text; yield its last `tail` tokens as a chunk with logits, and the past entries before it."""
    stream = TargetStream(decoder, layers, *ids_1L.shape)
    past = PastEntries()
    past_1N = ids_1L[:, :-tail]
    tail_1T = ids_1L[:, -tail:]
    for chunk_1T in torch.split(past_1N, width, 1) if past_1N.shape[1] else ():
        with torch.no_grad():
            for _ in draft_outputs(subject.layer, stream.read(chunk_1T), past, torch.zeros(1, dtype=torch.long), 1):
                pass
    yield stream.read(tail_1T, logits=True), past

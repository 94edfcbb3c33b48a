"""Losses over a large vocabulary, computed for a slice of positions at a time so that the logits stay in cache.

Shapes: N positions, D hidden, V vocabulary, C positions of a slice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from recipes.pair.batches import ANYTHING_BUT, IGNORED

HeadLoss = Callable[[torch.Tensor, slice], torch.Tensor]


def backward_in_slices(hidden_ND: torch.Tensor, head_loss: HeadLoss, size: int) -> torch.Tensor:
    """Sums `head_loss(hidden_CD, where)` over slices of `size` positions and leaves its gradients.

    Each slice's logits are freed at once. Returns the sum as a scalar on the device, so that nothing waits for it.
    """
    gradients, total = [], torch.zeros((), device=hidden_ND.device)
    for start in range(0, len(hidden_ND), size):
        where = slice(start, start + size)
        leaf_CD = hidden_ND[where].detach().requires_grad_()
        loss = head_loss(leaf_CD, where)
        loss.backward()
        gradients.append(torch.zeros_like(leaf_CD) if leaf_CD.grad is None else leaf_CD.grad)
        total += loss.detach()
    hidden_ND.backward(torch.cat(gradients))
    return total


def cross_entropy(head: torch.nn.Module, labels_N: torch.Tensor) -> HeadLoss:
    """Nats summed over the labelled positions: -log p of a token wanted, -log(1 - p) of one that is not."""

    def loss(hidden_CD: torch.Tensor, where: slice) -> torch.Tensor:
        logits_CV, labels_C = head(hidden_CD).float(), labels_N[where]
        wanted = F.cross_entropy(logits_CV, labels_C.clamp_min(IGNORED), ignore_index=IGNORED, reduction="sum")
        avoided = labels_C <= ANYTHING_BUT
        if not avoided.any():
            return wanted
        tokens_A1 = (ANYTHING_BUT - labels_C[avoided])[:, None]
        p_A1 = logits_CV[avoided].softmax(-1).gather(1, tokens_A1)
        return wanted - torch.log1p(-p_A1.clamp_max(1 - 1e-4)).sum()

    return loss


def distillation(
    head: torch.nn.Module,
    labels_N: torch.Tensor,
    teacher_head: torch.nn.Module,
    teacher_hidden_ND: torch.Tensor,
    kl_share: float,
) -> HeadLoss:
    """`kl_share` of KL(teacher || student) over the whole vocabulary, and cross-entropy for the rest, summed."""

    def loss(hidden_CD: torch.Tensor, where: slice) -> torch.Tensor:
        logp_CV = head(hidden_CD).float().log_softmax(-1)
        with torch.no_grad():
            teacher_CV = teacher_head(teacher_hidden_ND[where]).float().log_softmax(-1)
        labels_C = labels_N[where].clamp_min(IGNORED)
        known_C = labels_C != IGNORED
        kl = F.kl_div(logp_CV[known_C], teacher_CV[known_C], reduction="sum", log_target=True)
        ce = F.nll_loss(logp_CV, labels_C, ignore_index=IGNORED, reduction="sum")
        return kl_share * kl + (1 - kl_share) * ce

    return loss

"""Losses over a large vocabulary, computed for a slice of positions at a time, so that the logits stay in cache.

Shapes: N positions, D hidden size, V vocabulary, C positions of a slice, A positions with a token to avoid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from recipes.pair.batches import AVOIDED_BASE, IGNORED

HeadLoss = Callable[[torch.Tensor, slice], torch.Tensor]


def backward_in_slices(hidden_ND: torch.Tensor, head_loss: HeadLoss, size: int) -> torch.Tensor:
    """Sum `head_loss(hidden_CD, where)` over slices of `size` positions, and run its backward pass.

    The logits of a slice are freed after the slice. Returns the sum as a scalar on the device, without synchronisation.
    """
    gradients = []
    total = torch.zeros((), device=hidden_ND.device)
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
    """Return a loss in nats, summed over positions: -log p of a label, or -log(1 - p) of a token to avoid."""

    def loss(hidden_CD: torch.Tensor, where: slice) -> torch.Tensor:
        logits_CV = head(hidden_CD).float()
        labels_C = labels_N[where]
        label_loss = F.cross_entropy(logits_CV, labels_C.clamp_min(IGNORED), ignore_index=IGNORED, reduction="sum")
        avoided = labels_C <= AVOIDED_BASE
        if not avoided.any():
            return label_loss
        tokens_A1 = (AVOIDED_BASE - labels_C[avoided])[:, None]
        p_A1 = logits_CV[avoided].softmax(-1).gather(1, tokens_A1)
        return label_loss - torch.log1p(-p_A1.clamp_max(1 - 1e-4)).sum()

    return loss


SHARP = 0.6
"""Temperature at which a draft should agree with its target. Below 1, agreement needs more than a small KL."""


def distillation(
    head: torch.nn.Module,
    labels_N: torch.Tensor,
    teacher_head: torch.nn.Module,
    teacher_hidden_ND: torch.Tensor,
    kl_share: float,
) -> HeadLoss:
    """Return a loss whose value is the total variation of teacher and student at temperature `SHARP`.

    The value is summed over the labelled positions. It is the probability that the target rejects a draft token
    (Leviathan et al. 2023, theorem 3.5). The gradient is that of another loss: `kl_share` times KL(teacher || student)
    at temperature 1, and 1 - `kl_share` times the total variation. Its closed form is faster than autograd.
    """

    def loss(hidden_CD: torch.Tensor, where: slice) -> torch.Tensor:
        logits_CV = head(hidden_CD)
        with torch.no_grad():
            student_CV = logits_CV.float()
            teacher_CV = teacher_head(teacher_hidden_ND[where]).float()
            slope_CV = (student_CV.softmax(-1) - teacher_CV.softmax(-1)).mul_(kl_share)
            q_CV = student_CV.div_(SHARP).softmax(-1)
            p_CV = teacher_CV.div_(SHARP).softmax(-1)
            over_CV = (q_CV - p_CV).clamp_min_(0)
            total_C1 = over_CV.sum(-1, keepdim=True)
            over_CV.sign_().mul_(q_CV)  # q where it is above p
            rest_C1 = over_CV.sum(-1, keepdim=True)
            slope_CV.add_(over_CV.addcmul_(q_CV, rest_C1, value=-1), alpha=(1 - kl_share) / SHARP)
            known_C1 = (labels_N[where] >= 0)[:, None]
            slope_CV.mul_(known_C1)
        value: torch.Tensor = _Descent.apply(logits_CV, slope_CV, (total_C1 * known_C1).sum())  # type: ignore[no-untyped-call]
        return value

    return loss


class _Descent(torch.autograd.Function):
    """A function of the logits with a given value and a given gradient."""

    @staticmethod
    def forward(ctx: Any, logits_CV: torch.Tensor, slope_CV: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slope_CV.to(logits_CV.dtype))
        return value

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (slope_CV,) = ctx.saved_tensors
        return slope_CV * scale, None, None

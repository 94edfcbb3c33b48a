"""Losses of a draft: written out, and as autograd derives them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from recipes.pair import losses
from recipes.pair.batches import IGNORED


@pytest.mark.parametrize("kl_share", [0.0, 0.1, 1.0])
def test_distillation_gradient_has_both_laws(kl_share: float) -> None:
    torch.manual_seed(0)
    head, teacher = (torch.nn.Linear(8, 30, bias=False) for _ in range(2))
    hidden_ND = torch.randn(9, 8)
    teacher_ND = 2 * torch.randn(9, 8)
    labels_N = torch.tensor([3, IGNORED, 5, -1003, 0, 29, 7, IGNORED, 1])
    known_N = labels_N >= 0

    written_ND = hidden_ND.clone().requires_grad_()
    loss = losses.distillation(head, labels_N, teacher, teacher_ND, kl_share)(written_ND, slice(0, 9))
    (loss / 6).backward()
    by_hand = written_ND.grad, head.weight.grad.clone()

    head.zero_grad()
    found_ND = hidden_ND.clone().requires_grad_()
    q_NV = head(found_ND)[known_N]
    p_NV = teacher(teacher_ND).detach()[known_N]
    kl = F.kl_div(q_NV.log_softmax(-1), p_NV.log_softmax(-1), reduction="sum", log_target=True)
    refused = ((q_NV / losses.SHARP).softmax(-1) - (p_NV / losses.SHARP).softmax(-1)).abs().sum() / 2
    ((kl_share * kl + (1 - kl_share) * refused) / 6).backward()

    assert loss.item() == pytest.approx(refused.item(), rel=1e-5)
    torch.testing.assert_close(by_hand, (found_ND.grad, head.weight.grad))

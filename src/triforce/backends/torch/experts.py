"""A mixture of experts on the torch path.

Shape suffixes: N tokens, C hidden size, E experts, K experts of a token, G groups.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.model.architecture import Experts
from triforce.model.expert_unions import SAMPLED
from triforce.model.weights import Layer, Mlp

LEAST_SUM = 1e-20
"""Added to what weights of sigmoids are divided by, as models were trained."""


def choose(logits_NE: Tensor, experts: Experts, correction_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, int64 (N, K), and their weights (N, K): among equals the lowest ids.

    Shared experts come last.
    """
    ids = worth(logits_NE, experts, correction_E).sort(dim=1, descending=True, stable=True).indices
    logits, chosen = logits_NE.gather(1, ids), experts.chosen
    if experts.function == "softmax":
        weights_NK = (logits[:, :chosen] if experts.renormalised else logits).softmax(1)[:, :chosen]
    else:
        weights_NK = logits[:, :chosen].sigmoid()
        if experts.renormalised:
            weights_NK = weights_NK / (weights_NK.sum(1, keepdim=True) + LEAST_SUM)
    shared = torch.arange(experts.count, experts.held, device=ids.device).expand(len(ids), -1)
    weights_NK = F.pad(weights_NK * experts.scale, (0, experts.shared), value=1.0)
    return torch.cat([ids[:, :chosen], shared], 1), weights_NK


def worth(logits_NE: Tensor, experts: Experts, correction_E: Tensor | None) -> Tensor:
    """Return by what experts are chosen, (N, E): scores, corrected, where their group is one of the best.

    Logits where there is no more to it, as scores have the same order, but for their rounding.
    """
    if correction_E is None and experts.groups == 1:
        return logits_NE
    scores_NE = logits_NE.softmax(1) if experts.function == "softmax" else logits_NE.sigmoid()
    worth_NE = scores_NE if correction_E is None else scores_NE + correction_E
    if experts.groups == experts.chosen_groups:
        return worth_NE
    worth_NGE = worth_NE.view(len(worth_NE), experts.groups, -1)
    of_group_NG = worth_NGE.topk(2, dim=2).values.sum(2)
    others_NG = of_group_NG.sort(dim=1, descending=True, stable=True).indices[:, experts.chosen_groups :]
    left_out_NG = torch.zeros_like(of_group_NG, dtype=torch.bool).scatter_(1, others_NG, True)
    return worth_NGE.masked_fill(left_out_NG[..., None], -torch.inf).view_as(worth_NE)


def union(ids_NK: Tensor) -> int:
    """Return how many experts some tokens go through together."""
    return len({*ids_NK.flatten().tolist()})


Half = Callable[[Mlp, Tensor], Tensor]
"""A half of an expert, on some rows."""


def mix(
    y_NC: Tensor, layer: Layer, experts: Experts, gate: Half, down: Half, read: Callable[[Tensor], Tensor]
) -> tuple[Tensor, int]:
    """Return (N, C), what the experts of each token give: weighted, and summed in float32 in ascending order of ids.

    Between `gate` and `down` ranks `read` what the first halves of all experts give, (N * K, some of I), at once. The
    router's logits are float32, as its weight is. Returns the number of experts that the first tokens, at most
    `SAMPLED`, go through together, too.
    """
    assert layer.router_EC is not None
    logits_NE = F.linear(y_NC.float(), layer.router_EC, layer.router_bias_E)
    ids_NK, weights_NK = choose(logits_NE, experts, layer.router_correction_E)
    ids = sorted({*ids_NK.flatten().tolist()})
    touched, places = [layer.experts[e] for e in ids], [(ids_NK == e).nonzero(as_tuple=True) for e in ids]
    gated = read(torch.cat([gate(expert, y_NC[rows]) for expert, (rows, _) in zip(touched, places, strict=True)]))
    sum_NC = y_NC.new_zeros(len(y_NC), touched[0].down_proj_CI.shape[0], dtype=torch.float32)
    each = torch.split(gated, [len(rows) for rows, _ in places])
    for expert, (rows, which), some in zip(touched, places, each, strict=True):
        sum_NC[rows] += weights_NK[rows, which, None] * down(expert, some).float()
    return sum_NC.to(y_NC.dtype), union(ids_NK[:SAMPLED])

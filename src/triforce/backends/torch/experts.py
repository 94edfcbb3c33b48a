"""A mixture of experts on the torch path. Shape suffixes: N tokens, C hidden size, E experts, K experts of a token."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.model.architecture import Experts
from triforce.model.expert_unions import SAMPLED
from triforce.model.weights import Layer, Mlp


def choose(logits_NE: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, int64 (N, K), and their weights (N, K): among equals the lowest ids."""
    logits, ids = logits_NE.sort(dim=1, descending=True, stable=True)
    weights_NE = (logits[:, : experts.chosen] if experts.renormalised else logits).softmax(1)
    return ids[:, : experts.chosen], weights_NE[:, : experts.chosen]


def union(ids_NK: Tensor) -> int:
    """Return how many experts some tokens have chosen together."""
    return len({*ids_NK.flatten().tolist()})


Half = Callable[[Mlp, Tensor], Tensor]
"""A half of an expert, on some rows."""


def mix(
    y_NC: Tensor, layer: Layer, experts: Experts, gate: Half, down: Half, read: Callable[[Tensor], Tensor]
) -> tuple[Tensor, int]:
    """Return (N, C), what the experts of each token give: weighted, and summed in float32 in ascending order of ids.

    Between `gate` and `down` ranks `read` what the first halves of all experts give, (N * K, some of I), at once. The
    router's logits are float32, as its weight is. Returns the number of experts that the first tokens, at most
    `SAMPLED`, have chosen together, too.
    """
    assert layer.router_EC is not None
    ids_NK, weights_NK = choose(F.linear(y_NC.float(), layer.router_EC, layer.router_bias_E), experts)
    ids = sorted({*ids_NK.flatten().tolist()})
    touched, places = [layer.experts[e] for e in ids], [(ids_NK == e).nonzero(as_tuple=True) for e in ids]
    gated = read(torch.cat([gate(expert, y_NC[rows]) for expert, (rows, _) in zip(touched, places, strict=True)]))
    sum_NC = y_NC.new_zeros(len(y_NC), touched[0].down_proj_CI.shape[0], dtype=torch.float32)
    each = torch.split(gated, [len(rows) for rows, _ in places])
    for expert, (rows, which), some in zip(touched, places, each, strict=True):
        sum_NC[rows] += weights_NK[rows, which, None] * down(expert, some).float()
    return sum_NC.to(y_NC.dtype), union(ids_NK[:SAMPLED])

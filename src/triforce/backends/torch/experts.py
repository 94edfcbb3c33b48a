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


def mix(y_NC: Tensor, layer: Layer, experts: Experts, run: Callable[[Mlp, Tensor], Tensor]) -> tuple[Tensor, int]:
    """Return (N, C), what the experts of each token give: weighted, and summed in float32 in ascending order of ids.

    `run` an expert on some rows. The router's logits are float32, as its weight is. Returns the number of experts that
    the first tokens, at most `SAMPLED`, have chosen together, too.
    """
    assert layer.router_EC is not None
    ids_NK, weights_NK = choose(F.linear(y_NC.float(), layer.router_EC, layer.router_bias_E), experts)
    sum_NC = torch.zeros_like(y_NC, dtype=torch.float32)
    for expert in sorted({*ids_NK.flatten().tolist()}):
        rows, places = (ids_NK == expert).nonzero(as_tuple=True)
        sum_NC[rows] += weights_NK[rows, places, None] * run(layer.experts[expert], y_NC[rows]).float()
    return sum_NC.to(y_NC.dtype), union(ids_NK[:SAMPLED])

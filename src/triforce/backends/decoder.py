"""The Llama-family decoder: one forward pass for prefill, drafting and verification, through any cache view.

The cache attends, and rotates: the decoder hands it its weights, so nothing here depends on the tier.

Shape suffixes: B rows, T tokens fed, J scored columns, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from triforce.backends import dispatch
from triforce.distributed.group import ALONE, TPGroup
from triforce.model.config import ModelConfig
from triforce.model.weights import Weights


class View(Protocol):
    """What the decoder asks of a cache view that has been told of the pass."""

    def forward(self, model: dispatch.ModelBackend, ids_BT: Tensor, at_BJ: Tensor | None) -> Tensor: ...


class Decoder:
    """A model without its cache: weights of one dtype on one device, never trained.

    `int8`: they are rounded to that, which is only for tiers whose tokens are verified. Raises RequestError where the
    kernels cannot do it. `ranks` share the model: config and weights are then this one's.
    """

    def __init__(self, config: ModelConfig, weights: Weights, int8: bool = False, ranks: TPGroup = ALONE) -> None:
        self.config, self.ranks = config, ranks
        self.device, self.dtype = weights.embedding_VC.device, weights.embedding_VC.dtype
        self.model = dispatch.model(config, weights, int8, ranks)

    # Not inference_mode: what a caller keeps from a pass may later be changed in place outside of it.
    @torch.no_grad()
    def __call__(self, ids_BT: Tensor, cache: View, at_BJ: Tensor | None = None) -> Tensor:
        """Logits of the columns `at_BJ` of this pass (None: all of them, J = T; J = 0 scores nothing).

        `cache.begin` must have been called for the pass. Ids and columns are on the host. Returns float32
        (B, J, V).
        """
        return cache.forward(self.model, ids_BT, at_BJ)

"""The Llama-family decoder: one forward pass for prefill, drafting and verification, through any cache view.

The cache attends, and rotates: the decoder hands it plain q, k and v, so nothing here depends on the tier.

Shape suffixes: B rows, T tokens fed, N = B * T, J scored columns, V vocabulary, C hidden size, H query heads,
G KV heads, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from triforce import kernels
from triforce.config import ModelConfig
from triforce.weights import Weights


class Attention(Protocol):
    """What the decoder asks of a cache view that has been told of the pass."""

    def attend(self, layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor: ...


class Decoder:
    """A model without its cache: weights of one dtype on one device, never trained."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.device, self.dtype = weights.embedding_VC.device, weights.embedding_VC.dtype
        self.model = kernels.model(config, weights)

    # Not inference_mode: what a caller keeps from a pass may later be changed in place outside of it.
    @torch.no_grad()
    def __call__(self, ids_BT: Tensor, cache: Attention, at_BJ: Tensor | None = None) -> Tensor:
        """Logits of the columns `at_BJ` of this pass (None: all of them, J = T; J = 0 scores nothing).

        `cache.begin` must have been called for the pass. Returns float32 (B, J, V).
        """
        B, T = ids_BT.shape
        x_NC = self.model.embed(ids_BT.flatten())
        for index, block in enumerate(self.model.blocks):
            q, k, v = (x.view(B, T, *x.shape[1:]) for x in block.qkv(x_NC))
            block.finish(x_NC, cache.attend(index, q, k, v).flatten(0, 1).flatten(1))
        if at_BJ is not None:
            T = at_BJ.shape[1]
            x_NC = x_NC.view(B, -1, x_NC.shape[1]).take_along_dim(at_BJ[..., None], dim=1).flatten(0, 1)
        return self.model.head(x_NC).view(B, T, self.config.vocab_size)

"""The Llama-family decoder: one forward pass for prefill, drafting and verification, through any cache view.

The cache attends, and rotates: the decoder hands it plain q, k and v, so nothing here depends on the tier.

Shape suffixes: B rows, T tokens fed, J scored columns, V vocabulary, C hidden size, I MLP size, H query heads,
G KV heads, D head size, Q = H * D, P = G * D.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.config import ModelConfig


class Attention(Protocol):
    """What the decoder asks of a cache view that has been told of the pass."""

    def attend(self, layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The weights of one block; `None` where the family has none."""

    input_norm_C: Tensor
    q_proj_QC: Tensor
    k_proj_PC: Tensor
    v_proj_PC: Tensor
    o_proj_CQ: Tensor
    post_norm_C: Tensor
    gate_proj_IC: Tensor
    up_proj_IC: Tensor
    down_proj_CI: Tensor
    q_bias_Q: Tensor | None = None
    k_bias_P: Tensor | None = None
    v_bias_P: Tensor | None = None
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None


class Decoder:
    """A model without its cache: plain tensors of one dtype on one device, never trained."""

    def __init__(
        self, config: ModelConfig, embedding_VC: Tensor, layers: tuple[Layer, ...], norm_C: Tensor, head_VC: Tensor
    ) -> None:
        self.config = config
        self.embedding_VC = embedding_VC
        self.layers = layers
        self.norm_C = norm_C
        self.head_VC = head_VC

    @property
    def device(self) -> torch.device:
        return self.embedding_VC.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_VC.dtype

    def tensors(self) -> Iterator[Tensor]:
        """Every weight once, in a fixed order; a tied head is the embedding."""
        yield self.embedding_VC
        for layer in self.layers:
            yield from (tensor for f in fields(layer) if (tensor := getattr(layer, f.name)) is not None)
        yield self.norm_C
        if self.head_VC is not self.embedding_VC:
            yield self.head_VC

    # Not inference_mode: what a caller keeps from a pass may later be changed in place outside of it.
    @torch.no_grad()
    def __call__(self, ids_BT: Tensor, cache: Attention, at_BJ: Tensor | None = None) -> Tensor:
        """Logits of the columns `at_BJ` of this pass (None: all of them, J = T; J = 0 scores nothing).

        `cache.begin` must have been called for the pass. Returns float32 (B, J, V).
        """
        x_BTC = F.embedding(ids_BT, self.embedding_VC)
        for index, layer in enumerate(self.layers):
            x_BTC += self._mix(index, layer, self._norm(x_BTC, layer.input_norm_C), cache)
            x_BTC += _mlp(layer, self._norm(x_BTC, layer.post_norm_C))
        if at_BJ is not None:
            x_BTC = x_BTC.take_along_dim(at_BJ[..., None], dim=1)
        return F.linear(self._norm(x_BTC, self.norm_C), self.head_VC).float()

    def _mix(self, index: int, layer: Layer, x_BTC: Tensor, cache: Attention) -> Tensor:
        q_BTHD = self._heads(x_BTC, layer.q_proj_QC, layer.q_bias_Q, layer.q_norm_D)
        k_BTGD = self._heads(x_BTC, layer.k_proj_PC, layer.k_bias_P, layer.k_norm_D)
        v_BTGD = self._heads(x_BTC, layer.v_proj_PC, layer.v_bias_P, None)
        return F.linear(cache.attend(index, q_BTHD, k_BTGD, v_BTGD).flatten(2), layer.o_proj_CQ)

    def _heads(self, x_BTC: Tensor, weight: Tensor, bias: Tensor | None, norm_D: Tensor | None) -> Tensor:
        x_BTHD = F.linear(x_BTC, weight, bias).view(*x_BTC.shape[:2], -1, self.config.head_dim)
        return x_BTHD if norm_D is None else self._norm(x_BTHD, norm_D)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm (Zhang and Sennrich 2019) in float32; the weight is applied after rounding, as transformers does."""
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return weight * x32.to(x.dtype)


def _mlp(layer: Layer, x_BTC: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020)."""
    gate_BTI = F.silu(F.linear(x_BTC, layer.gate_proj_IC), inplace=True)
    return F.linear(gate_BTI.mul_(F.linear(x_BTC, layer.up_proj_IC)), layer.down_proj_CI)

"""A decoder's weights, packed for the native kernels; on demand rounded to int8. The residual stream is float32.

Shape suffixes as in kernel_api.py; Q = H * D.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.backends.cpu import _native
from triforce.model.config import ModelConfig
from triforce.model.weights import Layer, Weights


class EmbeddingAndHead:
    """Embedding and head, which may be one matrix; of some tokens or of all."""

    width_independent = True

    def __init__(self, config: ModelConfig, weights: Weights, int8: bool) -> None:
        self.config = config
        tied = weights.head_VC is weights.embedding_VC
        self._matrix = _native.Matrix(weights.head_VC, int8=int8)
        self._head = _native.Head(weights.norm_C, self._matrix, eps=config.norm_eps)
        self._embedding_VC = None if tied else weights.embedding_VC
        self._tokens = len(weights.head_VC)

    def embed(self, ids_N: Tensor) -> Tensor:
        if self._embedding_VC is not None:
            return F.embedding(ids_N, self._embedding_VC).float()
        x_NC = torch.empty(len(ids_N), self.config.hidden_size)
        self._matrix.rows(ids_N.contiguous(), x_NC)
        return x_NC

    def head(self, x_NC: Tensor) -> Tensor:
        logits_NV = torch.empty(len(x_NC), self._tokens)
        self._head.logits(x_NC, logits_NV)
        return logits_NV


class NativeModel(EmbeddingAndHead):
    def __init__(self, config: ModelConfig, weights: Weights, int8: bool = False) -> None:
        super().__init__(config, weights, int8)
        self.blocks = [NativeLayer(config, layer, int8) for layer in weights.layers]
        self.decoder = _native.Decoder([block.native for block in self.blocks], self._head, self._embedding_VC)


class NativeLayer:
    def __init__(self, config: ModelConfig, layer: Layer, int8: bool) -> None:
        self.config, self.dtype = config, layer.o_proj_CQ.dtype
        self.native = _native.Block(
            layer.input_norm_C, layer.q_proj_QC, layer.k_proj_PC, layer.v_proj_PC, layer.o_proj_CQ, layer.post_norm_C,
            layer.gate_proj_IC, layer.up_proj_IC, layer.down_proj_CI, layer.q_bias_Q, layer.k_bias_P, layer.v_bias_P,
            layer.q_norm_D, layer.k_norm_D, head_dim=config.head_dim, eps=config.norm_eps, int8=int8,
        )  # fmt: skip

    def qkv(self, x_NC: Tensor) -> tuple[Tensor, ...]:
        return project(self.native, self.config, x_NC)

    def finish(self, x_NC: Tensor, mixed_NQ: Tensor) -> None:
        self.native.finish(x_NC, mixed_NQ.to(self.dtype))


def project(native: _native.Block | _native.Projections, config: ModelConfig, x_NC: Tensor) -> tuple[Tensor, ...]:
    """Queries (N, H, D), keys and values (N, G, D)."""
    N, (H, G, D) = len(x_NC), (config.heads, config.kv_heads, config.head_dim)
    q, k, v = torch.empty(N, H * D), torch.empty(N, G * D), torch.empty(N, G * D)
    native.qkv(x_NC, q, k, v)
    return q.view(N, H, D), k.view(N, G, D), v.view(N, G, D)

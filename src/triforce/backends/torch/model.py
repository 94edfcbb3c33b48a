"""A decoder's weights on the torch path, correct on any device and for any dtype, and passes layer by layer.

Shape suffixes as in kernel_api.py; I MLP size, Q = H * D, P = G * D.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.arrays import Array, on_device
from triforce.backends.kernel_api import ForwardBatch, ForwardOutput, KVBackend
from triforce.backends.layerwise import forward_layerwise
from triforce.backends.torch.attention import capped
from triforce.backends.torch.tensor_weights import torch_weights
from triforce.distributed.group import ALONE, TPGroup, span
from triforce.model.config import Experts, ModelConfig
from triforce.model.expert_unions import SAMPLED_TOKENS
from triforce.model.weights import Layer, Matrix, Mlp, Weights, numbers
from triforce.ragged import Ints

LEAST_SUM = 1e-20
"""Number that is added to the sum by which sigmoid weights are divided, as in the models' training."""


def choose(logits_NE: Tensor, experts: Experts, correction_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, int64 (N, K), and their weights (N, K).

    Among equal scores the lowest ids are chosen. Shared experts come last.
    """
    ids = ranking_scores(logits_NE, experts, correction_E).sort(dim=1, descending=True, stable=True).indices
    logits = logits_NE.gather(1, ids)
    chosen = experts.chosen
    if experts.function == "softmax":
        weights_NK = (logits[:, :chosen] if experts.renormalised else logits).softmax(1)[:, :chosen]
    else:
        weights_NK = logits[:, :chosen].sigmoid()
        if experts.renormalised:
            weights_NK = weights_NK / (weights_NK.sum(1, keepdim=True) + LEAST_SUM)
    shared = torch.arange(experts.count, experts.total, device=ids.device).expand(len(ids), -1)
    weights_NK = F.pad(weights_NK * experts.scale, (0, experts.shared), value=1.0)
    return torch.cat([ids[:, :chosen], shared], 1), weights_NK


def ranking_scores(logits_NE: Tensor, experts: Experts, correction_E: Tensor | None) -> Tensor:
    """Return the values that rank experts, (N, E): corrected scores, -inf outside of the best groups.

    Without correction and groups the values are the logits: apart from rounding, scores have the same order.
    """
    if correction_E is None and experts.groups == 1:
        return logits_NE
    scores_NE = logits_NE.softmax(1) if experts.function == "softmax" else logits_NE.sigmoid()
    ranking_NE = scores_NE if correction_E is None else scores_NE + correction_E
    if experts.groups == experts.chosen_groups:
        return ranking_NE
    ranking_NGE = ranking_NE.view(len(ranking_NE), experts.groups, -1)
    group_scores_NG = ranking_NGE.topk(2, dim=2).values.sum(2)
    dropped_NG = group_scores_NG.sort(dim=1, descending=True, stable=True).indices[:, experts.chosen_groups :]
    is_dropped_NG = torch.zeros_like(group_scores_NG, dtype=torch.bool).scatter_(1, dropped_NG, True)
    return ranking_NGE.masked_fill(is_dropped_NG[..., None], -torch.inf).view_as(ranking_NE)


def distinct_experts(ids_NK: Tensor) -> int:
    """Return the number of distinct experts that tokens go through."""
    return len({*ids_NK.flatten().tolist()})


Half = Callable[[Mlp, Tensor], Tensor]
"""Half of an expert (gate and up, or down), on some rows."""


def mix(
    y_NC: Tensor, layer: Layer, experts: Experts, gate: Half, down: Half, exchange: Callable[[Tensor], Tensor]
) -> tuple[Tensor, int]:
    """Return the experts' outputs (N, C) of each token, weighted and summed in float32 in ascending order of ids.

    `gate` and `down` are the halves of an expert. Between them, one call of `exchange` gives ranks the inputs of `down`
    from the gated outputs of all experts, (N * K, this rank's part of I). The router's logits are float32, as its
    weight is. Also returns the number of distinct experts that the first `SAMPLED_TOKENS` tokens read.
    """
    assert layer.router_EC is not None
    logits_NE = F.linear(y_NC.float(), layer.router_EC, layer.router_bias_E)
    ids_NK, weights_NK = choose(logits_NE, experts, layer.router_correction_E)
    ids = sorted({*ids_NK.flatten().tolist()})
    read_experts = [layer.experts[e] for e in ids]
    places = [(ids_NK == e).nonzero(as_tuple=True) for e in ids]
    gated = exchange(
        torch.cat([gate(expert, y_NC[rows]) for expert, (rows, _) in zip(read_experts, places, strict=True)])
    )
    sum_NC = y_NC.new_zeros(len(y_NC), read_experts[0].down_proj_CI.shape[0], dtype=torch.float32)
    gated_by_expert = torch.split(gated, [len(rows) for rows, _ in places])
    for expert, (rows, choice), gated_XI in zip(read_experts, places, gated_by_expert, strict=True):
        sum_NC[rows] += weights_NK[rows, choice, None] * down(expert, gated_XI).float()
    return sum_NC.to(y_NC.dtype), distinct_experts(ids_NK[:SAMPLED_TOKENS])


CLAMP = 7.0
"""Bound of gate and up projection in `clamped_swiglu`."""
GAIN = 1.702
"""Factor of the gate in the sigmoid of `clamped_swiglu`."""


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019) in float32; the weight is applied after rounding, as transformers does.

    A float32 weight with an `x` of fewer bits is applied before rounding.
    """
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * x32.to(x.dtype) if weight.dtype == x.dtype else (weight * x32).to(x.dtype)


def swiglu(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    """Return SwiGLU (Shazeer 2020), (N, I), in the gate's memory."""
    return F.silu(gate_NI, inplace=True).mul_(up_NI)


def geglu(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    """Return GEGLU (Shazeer 2020), (N, I), by the tanh approximation."""
    return F.gelu(gate_NI, approximate="tanh").mul_(up_NI)


def clamped_swiglu(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    """Return the SwiGLU of gpt-oss (arXiv 2508.10925), (N, I): clamped gate and up, a steeper sigmoid, and up + 1."""
    gate_NI = gate_NI.clamp(max=CLAMP)
    up_NI = up_NI.clamp(-CLAMP, CLAMP)
    return (up_NI + 1) * (gate_NI * torch.sigmoid(gate_NI * GAIN))


def linear(x: Tensor, weight: Matrix | None, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, of the shape of x except for its last dimension."""
    return F.linear(x, numbers(weight), bias)


class TorchLayer:
    norm = staticmethod(norm)
    swiglu = staticmethod(swiglu)
    linear = staticmethod(linear)

    def __init__(self, config: ModelConfig, layer: Layer) -> None:
        self.config = config
        self.layer = layer

    def qkv(self, x_NC: Tensor, ranks: TPGroup = ALONE) -> tuple[Tensor, ...]:
        layer = self.layer
        scale = self.config.architecture.query_scale
        x_NC = self._normed(x_NC, layer.input_norm_C)
        q_NHD = self._heads(x_NC, layer.q_proj_QC, layer.q_bias_Q, layer.q_norm_D, ranks)
        return (
            q_NHD if scale == 1 else q_NHD * scale,
            self._heads(x_NC, layer.k_proj_PC, layer.k_bias_P, layer.k_norm_D, ranks),
            self._heads(x_NC, layer.v_proj_PC, layer.v_bias_P, None, ranks),
        )

    def finish(self, x_NC: Tensor, attn_out_NQ: Tensor, ranks: TPGroup = ALONE) -> int:
        C = x_NC.shape[1]
        part_NC = self.out(ranks.inputs(attn_out_NQ, self.layer.o_proj_CQ.shape[1]))
        self._add(x_NC, ranks.outputs(part_NC, C), self.layer.attn_out_norm_C)
        part_NC, distinct_count = self._mlp(x_NC, ranks)
        self._add(x_NC, ranks.outputs(part_NC, C), self.layer.mlp_out_norm_C)
        return distinct_count

    def out(self, attn_out_NQ: Tensor) -> Tensor:
        return self.linear(attn_out_NQ, self.layer.o_proj_CQ, self.layer.o_bias_C)

    def gate(self, x_NC: Tensor) -> Tensor:
        return self._gate(self.layer, self._normed(x_NC, self.layer.post_norm_C))

    def down(self, gated_NI: Tensor) -> Tensor:
        return self._down(self.layer, gated_NI)

    def _mlp(self, x_NC: Tensor, ranks: TPGroup) -> tuple[Tensor, int]:
        layer = self.layer
        experts = self.config.architecture.experts
        if layer.down_proj_CI is not None:
            return self.down(ranks.inputs(self.gate(x_NC), layer.down_proj_CI.shape[1])), 0
        assert experts is not None
        y_NC = self._normed(x_NC, layer.post_norm_C)
        inner = layer.experts[0].down_proj_CI.shape[1]
        exchange = partial(ranks.inputs, width=inner)
        return mix(y_NC, layer, experts, self._gate, self._down, exchange)

    def _gate(self, mlp: Layer | Mlp, y_NC: Tensor) -> Tensor:
        gate_NI = self.linear(y_NC, mlp.gate_proj_IC, mlp.gate_bias_I)
        up_NI = self.linear(y_NC, mlp.up_proj_IC, mlp.up_bias_I)
        return self._activated(gate_NI, up_NI)

    def _down(self, mlp: Layer | Mlp, gated_NI: Tensor) -> Tensor:
        return self.linear(gated_NI, mlp.down_proj_CI, mlp.down_bias_C)

    def _activated(self, gate_NI: Tensor, up_NI: Tensor) -> Tensor:
        activations = {"silu": self.swiglu, "gelu": geglu, "clamped": clamped_swiglu}
        return activations[self.config.architecture.activation](gate_NI, up_NI)

    def _heads(
        self, x_NC: Tensor, weight: Matrix, bias: Tensor | None, norm_D: Tensor | None, ranks: TPGroup
    ) -> Tensor:
        x_NQ = self.linear(x_NC, weight, bias)
        eps = self.config.norm_eps
        x_NHD = x_NQ.view(len(x_NC), -1, self.config.head_dim)
        if norm_D is None:
            return x_NHD
        if self.config.architecture.qk_norm != "row":
            return self.norm(x_NHD, norm_D, eps)
        all_NQ = self.norm(ranks.gather(x_NQ, len(norm_D)), norm_D, eps)
        return all_NQ[:, span(len(norm_D), ranks)].reshape(x_NHD.shape)

    def _normed(self, x_NC: Tensor, norm_C: Tensor | None) -> Tensor:
        return x_NC if norm_C is None else self.norm(x_NC, norm_C, self.config.norm_eps)

    def _add(self, x_NC: Tensor, part_NC: Tensor, norm_C: Tensor | None) -> None:
        """Add the output of attention or MLP to the residual stream, in place."""
        x_NC.add_(self._normed(part_NC, norm_C), alpha=self.config.architecture.residual_scale)


class TorchModel:
    width_independent = False
    """False, as torch's matrix products do not guarantee it."""
    block = TorchLayer
    upload = staticmethod(torch_weights)

    def __init__(self, config: ModelConfig, weights: Weights, device: str = "cpu") -> None:
        """weights: host arrays."""
        self.config = config
        self.weights = self.upload(weights, device)
        self.blocks = [self.block(config, layer) for layer in self.weights.layers]

    @torch.no_grad()
    def forward(self, ids_BT: Ints, kv: KVBackend, batch: ForwardBatch, at_BJ: Ints | None) -> ForwardOutput:
        return forward_layerwise(self, ids_BT, kv, batch, at_BJ)

    def embed(self, ids_N: Array) -> Tensor:
        table_VC = numbers(self.weights.embedding_VC)
        scale = self.config.architecture.embedding_scale
        x_NC = F.embedding(on_device(ids_N, table_VC.device), table_VC)
        return x_NC if scale == 1 else x_NC * torch.tensor(scale, dtype=x_NC.dtype, device=x_NC.device)

    def head_rows(self, ids_N: Array) -> Tensor:
        """Return the head's rows of tokens `ids_N`: float32 (N, C)."""
        head_VC = numbers(self.weights.head_VC)
        rows_NC: Tensor = head_VC[on_device(ids_N, head_VC.device)]
        return rows_NC.float()

    def head(self, x_NC: Tensor) -> Tensor:
        y_NC = self.block.norm(x_NC, self.weights.norm_C, self.config.norm_eps)
        architecture = self.config.architecture
        logits_NV = self.block.linear(y_NC, self.weights.head_VC).float()
        logits_NV = logits_NV if architecture.logit_scale == 1 else logits_NV.mul_(architecture.logit_scale)
        return capped(logits_NV, architecture.logit_cap)

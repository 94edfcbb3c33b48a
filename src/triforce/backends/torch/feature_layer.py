"""Passes of a feature draft in torch: what is trained, and what faster kernels are to be compared with.

The entry of slot t is made of token t and the state behind the token before it; it predicts token t + 1. So what a
slot holds depends on the tokens up to its own, as in every other layer. Slot 0 has a state of zeros.

Shape suffixes as in model/feature_draft.py; B rows, T entries, N queries, K keys, D head size, H query heads, G KV
heads, R = H / G.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.backends.torch.model import linear, norm
from triforce.model.feature_draft import FeatureDraftConfig, FeatureDraftWeights
from triforce.model.rope import rotate


class Entries(NamedTuple):
    """Rotated keys and values (B, K, G, D) of entries, and the slots (B, K) where they stand; -1: nowhere.

    Those of sinks come first.
    """

    keys_BKGD: Tensor
    values_BKGD: Tensor
    slots_BK: Tensor

    def then(self, other: Entries) -> Entries:
        """Return these and others behind them."""
        return Entries(*(torch.cat(both, 1) for both in zip(self, other, strict=True)))


class FeatureLayer:
    """The layer, but for the embedding: tensors in, tensors out, of the norms' type, `stream`."""

    def __init__(self, config: FeatureDraftConfig, weights: FeatureDraftWeights) -> None:
        self.config, self.weights, self.stream = config, weights, weights.norm_C.dtype

    def fuse(self, states_BTX: Tensor) -> Tensor:
        """Return what stands for the target's states, (B, T, C); a state of zeros gives zeros."""
        norms_SC = self.weights.fc_norm_SC
        if norms_SC is not None:
            states_BTSC = states_BTX.view(*states_BTX.shape[:2], *norms_SC.shape)
            normed = [norm(states_BTSC[..., s, :], norms_SC[s], self.config.norm_eps) for s in range(len(norms_SC))]
            states_BTX = torch.cat(normed, -1)
        return self.times("fc_CX", states_BTX)

    def inputs(self, fused_BTC: Tensor, embeddings_BTC: Tensor) -> Tensor:
        """Return what q, k and v are projected from, (B, T, 2 C)."""
        embedding_BTC = norm(embeddings_BTC, self.weights.embedding_norm_C, self.config.norm_eps)
        return torch.cat((embedding_BTC, norm(fused_BTC, self.weights.hidden_norm_C, self.config.norm_eps)), -1)

    def queries(self, inputs_BTE: Tensor) -> Tensor:
        """Return queries (B, T, H, D), not yet rotated."""
        return self._heads("q_proj_QE", inputs_BTE)

    def keys_values(self, inputs_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, T, G, D), not yet rotated."""
        return self._heads("k_proj_PE", inputs_BTE), self._heads("v_proj_PE", inputs_BTE)

    def finish(self, fused_BNC: Tensor, inputs_BNE: Tensor, attn_out_BNQ: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs for the head, and what stands for the next states: (B, N, C) each."""
        config, weights = self.config, self.weights
        embedding_BNC, hidden_BNC = inputs_BNE.chunk(2, -1)
        x_BNC = hidden_BNC if config.norm_before_residual else fused_BNC
        if config.embedding_residual:
            x_BNC = x_BNC + self.times("embedding_proj_CC", embedding_BNC)
        x_BNC = x_BNC + self.times("o_proj_CQ", attn_out_BNQ)
        x_BNC = x_BNC + self.times("down_proj_CI", self._gated(x_BNC))
        out_BNC = norm(x_BNC, weights.norm_C, config.norm_eps)
        return out_BNC, out_BNC if config.norm_output else x_BNC

    def times(self, weight: str, x: Tensor) -> Tensor:
        """Return the product (..., O) of x (..., I) with the weight of that field."""
        return linear(x, getattr(self.weights, weight))

    def entries(self, fused_BTC: Tensor, embeddings_BTC: Tensor, slots_BT: Tensor) -> Entries:
        """Return the keys and values of slots, each made of the fused state before it and its token's embedding."""
        return self._entries(self.inputs(fused_BTC, embeddings_BTC), slots_BT)

    def step(
        self,
        fused_BNC: Tensor,
        embeddings_BNC: Tensor,
        slots_BN: Tensor,
        seen: Entries,
        last_BN: Tensor,
        chain: Sequence[Entries] = (),
    ) -> tuple[Tensor, Tensor, Entries]:
        """Outputs of some slots, for the head: (B, N, C); what stands for the next states; and their own entries.

        Each sees of `seen` the slots up to `last_BN`, and of each of `chain`, (B, N), its own: guesses that led to it.
        Itself it sees if it is none of those seen, that is, if `last_BN` is below its slot. All within the window.
        """
        inputs_BNE = self.inputs(fused_BNC, embeddings_BNC)
        own = self._entries(inputs_BNE, slots_BN)
        chain = [*chain, own] if len(chain) or bool((last_BN < slots_BN).any()) else []
        attn_out_BNQ = self._attend(self.queries(inputs_BNE), slots_BN, seen, last_BN, chain)
        return *self.finish(fused_BNC, inputs_BNE, attn_out_BNQ), own

    def _gated(self, x_BNC: Tensor) -> Tensor:
        y_BNC = norm(x_BNC, self.weights.post_norm_C, self.config.norm_eps)
        return F.silu(self.times("gate_proj_IC", y_BNC)) * self.times("up_proj_IC", y_BNC)

    def _entries(self, inputs_BTE: Tensor, slots_BT: Tensor) -> Entries:
        k_BTGD, v_BTGD = self.keys_values(inputs_BTE)
        return Entries(rotate(k_BTGD, self.config.rope.cos_sin(slots_BT)), v_BTGD, slots_BT)

    def _heads(self, weight: str, inputs_BTE: Tensor) -> Tensor:
        return self.times(weight, inputs_BTE).view(*inputs_BTE.shape[:2], -1, self.config.head_dim)

    def _attend(
        self, q_BNHD: Tensor, slots_BN: Tensor, seen: Entries, last_BN: Tensor, chain: Sequence[Entries]
    ) -> Tensor:
        """Mixed values (B, N, Q). Queries meet the sinks from their place in [sinks | window] (`StreamingView`)."""
        config, (N, D) = self.config, q_BNHD.shape[1::2]
        keys, values = (torch.cat([each[i] for each in (seen, *chain)], 1).transpose(1, 2) for i in (0, 1))
        one_NN = torch.eye(N, dtype=torch.bool, device=keys.device).expand(len(keys), -1, -1)
        visible_BNK = torch.cat([self._visible(seen.slots_BK, slots_BN, last_BN), *(one_NN for _ in chain)], 2)
        q = rotate(q_BNHD, config.rope.cos_sin(slots_BN)).transpose(1, 2)
        if bool((slots_BN >= config.sinks + config.window).any()):
            # Twice the width: a far query finds zeros in entries that are no sinks, and a near one in those that are.
            # A guess lies within the window, or is a sink whose query stands where it is: it is met as it stands.
            far = rotate(q_BNHD, config.rope.cos_sin(slots_BN.clamp_max(config.sinks + config.window - 1)))
            is_sink_BK = F.pad(seen.slots_BK < config.sinks, (0, N * len(chain)))[:, None, :, None]
            q = torch.cat((q, far.transpose(1, 2)), -1)
            keys = torch.cat((keys * ~is_sink_BK, keys * is_sink_BK), -1)
            values = F.pad(values, (0, D))
        repeats = config.heads // config.kv_heads
        keys, values = (each.repeat_interleave(repeats, 1) for each in (keys, values))
        mixed_BHND = F.scaled_dot_product_attention(q, keys, values, visible_BNK[:, None], scale=D**-0.5)
        return mixed_BHND[..., :D].transpose(1, 2).flatten(2)

    def _visible(self, slots_BK: Tensor, slots_BN: Tensor, last_BN: Tensor) -> Tensor:
        """Return which entries each query sees, bool (B, N, K)."""
        key_B1K = slots_BK[:, None]
        in_reach_BNK = (key_B1K < self.config.sinks) | (key_B1K > slots_BN[..., None] - self.config.window)
        return in_reach_BNK & (key_B1K <= last_BN[..., None]) & (key_B1K >= 0)

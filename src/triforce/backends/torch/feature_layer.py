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
        return torch.cat((embedding_BTC, self._hidden(fused_BTC)), -1)

    def queries(self, inputs_BTE: Tensor) -> Tensor:
        """Return queries (B, T, H, D), not yet rotated."""
        return self._heads("q_proj_QE", inputs_BTE)

    def keys_values(self, inputs_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, T, G, D), not yet rotated."""
        return self._heads("k_proj_PE", inputs_BTE), self._heads("v_proj_PE", inputs_BTE)

    def finish(self, fused_BNC: Tensor, attn_out_BNQ: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs for the head, and what stands for the next states: (B, N, C) each."""
        config, weights = self.config, self.weights
        x_BNC = self._hidden(fused_BNC) if config.norm_before_residual else fused_BNC
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
        return *self.finish(fused_BNC, attn_out_BNQ), own

    def _hidden(self, fused_BTC: Tensor) -> Tensor:
        return norm(fused_BTC, self.weights.hidden_norm_C, self.config.norm_eps)

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
        config, (B, N, _, D) = self.config, q_BNHD.shape
        near_BGRND, far_BGRND = (
            rotate(q_BNHD, config.rope.cos_sin(places_BN)).view(B, N, config.kv_heads, -1, D).permute(0, 2, 3, 1, 4)
            for places_BN in (slots_BN, slots_BN.clamp_max(config.sinks + config.window - 1))
        )
        scores = [self._scores(near_BGRND, far_BGRND, seen, slots_BN, last_BN)]
        # A guess lies within the window, or is a sink whose query stands where it is: it is met as it stands.
        for each in chain:
            scores.append((near_BGRND * each.keys_BKGD.transpose(1, 2)[:, :, None]).sum(-1, keepdim=True).float())
        weights = torch.cat(scores, -1).mul(config.head_dim**-0.5).softmax(-1).to(q_BNHD.dtype)
        K = seen.slots_BK.shape[1]
        mixed_BGRND = (weights[..., :K].flatten(2, 3) @ seen.values_BKGD.transpose(1, 2)).view(near_BGRND.shape)
        for j, each in enumerate(chain):
            share = weights[..., K + j : K + j + 1]
            mixed_BGRND = mixed_BGRND + share * each.values_BKGD.transpose(1, 2)[:, :, None]
        return mixed_BGRND.permute(0, 3, 1, 2, 4).reshape(B, N, -1)

    def _scores(
        self, near_BGRND: Tensor, far_BGRND: Tensor, seen: Entries, slots_BN: Tensor, last_BN: Tensor
    ) -> Tensor:
        """Float32 (B, G, R, N, K); -inf where a query does not see an entry."""
        sinks, shape = self.config.sinks, near_BGRND.shape[:4]
        keys_BGDK, key_B1K = seen.keys_BKGD.permute(0, 2, 3, 1), seen.slots_BK[:, None]
        near = near_BGRND.flatten(2, 3) @ keys_BGDK
        far = far_BGRND.flatten(2, 3) @ keys_BGDK[..., :sinks]
        is_sink = (key_B1K[..., :sinks] < sinks)[:, None]
        scores = torch.cat((torch.where(is_sink, far, near[..., :sinks]), near[..., sinks:]), -1).float()
        in_reach_BNK = (key_B1K < sinks) | (key_B1K > slots_BN[..., None] - self.config.window)
        visible_BNK = in_reach_BNK & (key_B1K <= last_BN[..., None]) & (key_B1K >= 0)
        return scores.view(*shape, -1).masked_fill(~visible_BNK[:, None, None], -torch.inf)

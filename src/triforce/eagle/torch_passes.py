"""Passes of an EAGLE head on any kernels of KV memory: the reference of native ones.

Shape suffixes as in eagle/eagle_draft.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.backends.kernel_api import PAGE, ForwardBatch
from triforce.backends.torch.model import linear, norm
from triforce.eagle.head import EagleHeadConfig, EagleHeadWeights, EntryMemory
from triforce.model.rope import rotate
from triforce.ragged import Ints, ints, to_device


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


class EagleHeadLayer:
    """The layer, but for the embedding: tensors in, tensors out, of the norms' type, `stream`."""

    def __init__(self, config: EagleHeadConfig, weights: EagleHeadWeights) -> None:
        self.config = config
        self.weights = weights
        self.stream = weights.norm_C.dtype

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
        config = self.config
        weights = self.weights
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
        config = self.config
        (N, D) = q_BNHD.shape[1::2]
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


NEVER = -1e5
"""Logit of a token that the draft cannot propose. Finite, so that there is a law where a grammar allows no other."""


class TorchEagleHeadPasses:
    """embed: the target's, from ids (N) to (N, C). weights: with a head."""

    def __init__(self, config: EagleHeadConfig, weights: EagleHeadWeights, embed: Callable[[Tensor], Tensor]) -> None:
        self.config = config
        self.layer = EagleHeadLayer(config, weights)
        self._embed = embed
        self.weight_size = self.layer.stream.itemsize
        self._tokens_M = weights.tokens_M
        self._device = weights.tokens_M.device

    def forward(self, ids_BT: Tensor, memory: EntryMemory, batch: ForwardBatch, at_BJ: Tensor) -> Tensor:
        """Return logits of columns `at_BJ`, float32 (B, J, V). A row's last output is kept as a state."""
        (B, T), counts_B = ids_BT.shape, ints(batch.views[0][1].counts)
        own_BT, before_BT = (_padded(slots_N, counts_B, T) for slots_N in token_slots(batch, counts_B))
        fused_BTC = memory.states_NC[self._on_device(before_BT)].to(self.layer.stream)
        inputs_BTE = self.layer.inputs(fused_BTC, self._embed(ids_BT.flatten()).view(B, T, -1))
        qkv = self.layer.queries(inputs_BTE), *self.layer.keys_values(inputs_BTE)
        attn_out_BTQ = memory.kv.layer_attention(batch, T)(0, *qkv)[1].flatten(2).to(self.layer.stream)
        out_BTC, states_BTC = self.layer.finish(fused_BTC, inputs_BTE, attn_out_BTQ)
        live_B = counts_B > 0
        last_B = np.maximum(counts_B - 1, 0)
        ends = [self._on_device(own_BT[live_B, last_B[live_B]]), torch.from_numpy(last_B[live_B])]
        memory.states_NC[ends[0]] = states_BTC[torch.from_numpy(live_B.nonzero()[0]), ends[1]].to(
            memory.states_NC.dtype
        )
        return self._logits(out_BTC.take_along_dim(at_BJ[..., None].to(out_BTC.device), dim=1))

    def note(
        self, ids_N: Tensor, memory: EntryMemory, slots: tuple[Ints, Ints, Ints], columns_N: Ints, states_SBTC: Tensor
    ) -> None:
        """Make states and entries of tokens of the target's pass. slots: positions, own slots, those before (N)."""
        positions_N, own_N, before_N = (self._on_device(each_N) for each_N in slots)
        states_1NX = states_SBTC.flatten(1, 2)[:, self._on_device(columns_N)].transpose(0, 1).flatten(1)[None]
        memory.states_NC[own_N] = self.layer.fuse(states_1NX.to(self.layer.stream))[0].to(memory.states_NC.dtype)
        fused_1NC = memory.states_NC[before_N][None].to(self.layer.stream)
        inputs_1NE = self.layer.inputs(fused_1NC, self._embed(ids_N)[None])
        keys_NGD, values_NGD = (each[0] for each in self.layer.keys_values(inputs_1NE))
        rotation = self.config.rope.cos_sin(positions_N)
        memory.kv.write(0, own_N, rotate(keys_NGD, rotation).transpose(0, 1), values_NGD.transpose(0, 1))

    def _logits(self, out_BJC: Tensor) -> Tensor:
        few_BJM = self.layer.times("head_MC", out_BJC).float()
        logits_BJV = torch.full((*few_BJM.shape[:2], self.config.vocab_size), NEVER, device=few_BJM.device)
        return logits_BJV.index_copy_(2, self._tokens_M, few_BJM)

    def _on_device(self, slots: Ints) -> Tensor:
        return to_device(slots, self._device)


def token_slots(batch: ForwardBatch, counts_B: Ints) -> tuple[Ints, Ints]:
    """Return the slots (N) of a pass's tokens, row after row, and those of the token before each; 0 without one."""
    own = [ints([])]
    before = [ints([])]
    for table, start, count in zip(batch.tables, batch.positions, counts_B.tolist(), strict=True):
        if count:
            first = max(start - 1, 0)
            pages_P = ints(table[first // PAGE : (start + count - 1) // PAGE + 1])
            at_N = np.arange(first, start + count)
            slots_N = pages_P[at_N // PAGE - first // PAGE] * PAGE + at_N % PAGE
            own.append(slots_N[-count:])
            before.append(slots_N[:-1] if start else np.append(0, slots_N[:-1]))
    return np.concatenate(own), np.concatenate(before)


def _padded(slots_N: Ints, counts_B: Ints, width: int) -> Ints:
    """Lay out slots row by row; those of padding are 0."""
    slots_BT = np.zeros((len(counts_B), width), dtype=np.int64)
    slots_BT[np.arange(width) < counts_B[:, None]] = slots_N
    return slots_BT

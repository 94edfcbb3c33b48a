"""Passes of an EAGLE head in torch, on any kernels of KV memory: the reference of the native passes.

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
    """Rotated keys and values (B, K, G, D) of entries, and their slots (B, K); -1: padding.

    Entries of sinks come first.
    """

    keys_BKGD: Tensor
    values_BKGD: Tensor
    slots_BK: Tensor

    def then(self, other: Entries) -> Entries:
        """Return these entries followed by `other`."""
        return Entries(*(torch.cat(tensors, 1) for tensors in zip(self, other, strict=True)))


class EagleHeadLayer:
    """The head's layer without the embedding, as functions of tensors in the norms' dtype, `stream`."""

    def __init__(self, config: EagleHeadConfig, weights: EagleHeadWeights) -> None:
        self.config = config
        self.weights = weights
        self.stream = weights.norm_C.dtype

    def fuse(self, states_BTX: Tensor) -> Tensor:
        """Return the fused states of the target, (B, T, C); a state of zeros gives zeros."""
        norms_SC = self.weights.fc_norm_SC
        if norms_SC is not None:
            states_BTSC = states_BTX.view(*states_BTX.shape[:2], *norms_SC.shape)
            normed = [norm(states_BTSC[..., s, :], norms_SC[s], self.config.norm_eps) for s in range(len(norms_SC))]
            states_BTX = torch.cat(normed, -1)
        return self.times("fc_CX", states_BTX)

    def inputs(self, fused_BTC: Tensor, embeddings_BTC: Tensor) -> Tensor:
        """Return the inputs of the q, k and v projections, (B, T, 2 C)."""
        embedding_BTC = norm(embeddings_BTC, self.weights.embedding_norm_C, self.config.norm_eps)
        return torch.cat((embedding_BTC, norm(fused_BTC, self.weights.hidden_norm_C, self.config.norm_eps)), -1)

    def queries(self, inputs_BTE: Tensor) -> Tensor:
        """Return queries (B, T, H, D), not yet rotated."""
        return self._heads("q_proj_QE", inputs_BTE)

    def keys_values(self, inputs_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, T, G, D), not yet rotated."""
        return self._heads("k_proj_PE", inputs_BTE), self._heads("v_proj_PE", inputs_BTE)

    def finish(self, fused_BNC: Tensor, inputs_BNE: Tensor, attn_out_BNQ: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs for the output head, and the next fused states: (B, N, C) each."""
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
        """Return the product (..., O) of x (..., I) with the weight of a field."""
        return linear(x, getattr(self.weights, weight))

    def entries(self, fused_BTC: Tensor, embeddings_BTC: Tensor, slots_BT: Tensor) -> Entries:
        """Return the entries of slots. fused_BTC: fused state before each slot. embeddings_BTC: of their tokens."""
        return self._entries(self.inputs(fused_BTC, embeddings_BTC), slots_BT)

    def step(
        self,
        fused_BNC: Tensor,
        embeddings_BNC: Tensor,
        slots_BN: Tensor,
        context: Entries,
        last_BN: Tensor,
        chain: Sequence[Entries] = (),
    ) -> tuple[Tensor, Tensor, Entries]:
        """Return outputs of slots for the output head, (B, N, C); the next fused states; and the slots' entries.

        Within the window, query n attends to the entries of `context` up to slot `last_BN[:, n]`, and to entry n of
        each of `chain`, (B, N): the draft tokens that led to it. It attends to its own entry where `context` lacks it,
        that is, where `last_BN` is below its slot.
        """
        inputs_BNE = self.inputs(fused_BNC, embeddings_BNC)
        entries = self._entries(inputs_BNE, slots_BN)
        chain = [*chain, entries] if len(chain) or bool((last_BN < slots_BN).any()) else []
        attn_out_BNQ = self._attend(self.queries(inputs_BNE), slots_BN, context, last_BN, chain)
        return *self.finish(fused_BNC, inputs_BNE, attn_out_BNQ), entries

    def _gated(self, x_BNC: Tensor) -> Tensor:
        y_BNC = norm(x_BNC, self.weights.post_norm_C, self.config.norm_eps)
        return F.silu(self.times("gate_proj_IC", y_BNC)) * self.times("up_proj_IC", y_BNC)

    def _entries(self, inputs_BTE: Tensor, slots_BT: Tensor) -> Entries:
        k_BTGD, v_BTGD = self.keys_values(inputs_BTE)
        return Entries(rotate(k_BTGD, self.config.rope.cos_sin(slots_BT)), v_BTGD, slots_BT)

    def _heads(self, weight: str, inputs_BTE: Tensor) -> Tensor:
        return self.times(weight, inputs_BTE).view(*inputs_BTE.shape[:2], -1, self.config.head_dim)

    def _attend(
        self, q_BNHD: Tensor, slots_BN: Tensor, context: Entries, last_BN: Tensor, chain: Sequence[Entries]
    ) -> Tensor:
        """Return the attention output (B, N, Q). Queries attend to sinks from their place in [sinks | window].

        See `StreamingView` for these places.
        """
        config = self.config
        (N, D) = q_BNHD.shape[1::2]
        keys, values = (torch.cat([tensor[i] for tensor in (context, *chain)], 1).transpose(1, 2) for i in (0, 1))
        one_NN = torch.eye(N, dtype=torch.bool, device=keys.device).expand(len(keys), -1, -1)
        visible_BNK = torch.cat([self._visible(context.slots_BK, slots_BN, last_BN), *(one_NN for _ in chain)], 2)
        q = rotate(q_BNHD, config.rope.cos_sin(slots_BN)).transpose(1, 2)
        if bool((slots_BN >= config.sinks + config.window).any()):
            # Twice the width: the far half of a query meets zeros in entries that are no sinks, and its true half
            # meets zeros in sinks. Entries of `chain` use the true half: they lie in the window, or are sinks of a
            # query whose place in [sinks | window] is its true position.
            far_queries = rotate(q_BNHD, config.rope.cos_sin(slots_BN.clamp_max(config.sinks + config.window - 1)))
            is_sink_BK = F.pad(context.slots_BK < config.sinks, (0, N * len(chain)))[:, None, :, None]
            q = torch.cat((q, far_queries.transpose(1, 2)), -1)
            keys = torch.cat((keys * ~is_sink_BK, keys * is_sink_BK), -1)
            values = F.pad(values, (0, D))
        repeats = config.heads // config.kv_heads
        keys, values = (tensor.repeat_interleave(repeats, 1) for tensor in (keys, values))
        mixed_BHND = F.scaled_dot_product_attention(q, keys, values, visible_BNK[:, None], scale=D**-0.5)
        return mixed_BHND[..., :D].transpose(1, 2).flatten(2)

    def _visible(self, slots_BK: Tensor, slots_BN: Tensor, last_BN: Tensor) -> Tensor:
        """Return a mask of the entries that each query attends to, bool (B, N, K)."""
        key_B1K = slots_BK[:, None]
        in_reach_BNK = (key_B1K < self.config.sinks) | (key_B1K > slots_BN[..., None] - self.config.window)
        return in_reach_BNK & (key_B1K <= last_BN[..., None]) & (key_B1K >= 0)


EXCLUDED_LOGIT = -1e5
"""Logit of a token that the head cannot propose. It is finite, so that a grammar that allows no other token still
leaves a distribution."""


class TorchEagleHeadPasses:
    """Passes in torch. embed: the target's embedding, from ids (N) to (N, C). weights: with output-head rows."""

    def __init__(self, config: EagleHeadConfig, weights: EagleHeadWeights, embed: Callable[[Tensor], Tensor]) -> None:
        self.config = config
        self.layer = EagleHeadLayer(config, weights)
        self._embed = embed
        self.weight_size = self.layer.stream.itemsize
        self._tokens_M = weights.tokens_M
        self._device = weights.tokens_M.device

    def forward(self, ids_BT: Tensor, memory: EntryMemory, batch: ForwardBatch, at_BJ: Tensor) -> Tensor:
        """Return logits of columns `at_BJ`, float32 (B, J, V). A row's last output is written as a state."""
        B, T = ids_BT.shape
        counts_B = ints(batch.views[0][1].counts)
        slots_BT, previous_slots_BT = (_padded(slots_N, counts_B, T) for slots_N in token_slots(batch, counts_B))
        fused_BTC = memory.states_NC[self._on_device(previous_slots_BT)].to(self.layer.stream)
        inputs_BTE = self.layer.inputs(fused_BTC, self._embed(ids_BT.flatten()).view(B, T, -1))
        qkv = self.layer.queries(inputs_BTE), *self.layer.keys_values(inputs_BTE)
        attn_out_BTQ = memory.kv.layer_attention(batch, T)(0, *qkv)[1].flatten(2).to(self.layer.stream)
        out_BTC, states_BTC = self.layer.finish(fused_BTC, inputs_BTE, attn_out_BTQ)
        live_B = counts_B > 0
        last_B = np.maximum(counts_B - 1, 0)
        ends = [self._on_device(slots_BT[live_B, last_B[live_B]]), torch.from_numpy(last_B[live_B])]
        memory.states_NC[ends[0]] = states_BTC[torch.from_numpy(live_B.nonzero()[0]), ends[1]].to(
            memory.states_NC.dtype
        )
        return self._logits(out_BTC.take_along_dim(at_BJ[..., None].to(out_BTC.device), dim=1))

    def record_entries(
        self, ids_N: Tensor, memory: EntryMemory, slots: tuple[Ints, Ints, Ints], columns_N: Ints, states_SBTC: Tensor
    ) -> None:
        """Write states and entries of tokens of the target's pass, as `EagleHeadPasses.record_entries` says."""
        positions_N, token_slots_N, previous_slots_N = (self._on_device(index_N) for index_N in slots)
        states_1NX = states_SBTC.flatten(1, 2)[:, self._on_device(columns_N)].transpose(0, 1).flatten(1)[None]
        memory.states_NC[token_slots_N] = self.layer.fuse(states_1NX.to(self.layer.stream))[0].to(
            memory.states_NC.dtype
        )
        fused_1NC = memory.states_NC[previous_slots_N][None].to(self.layer.stream)
        inputs_1NE = self.layer.inputs(fused_1NC, self._embed(ids_N)[None])
        keys_NGD, values_NGD = (tensor[0] for tensor in self.layer.keys_values(inputs_1NE))
        rotation = self.config.rope.cos_sin(positions_N)
        memory.kv.write(0, token_slots_N, rotate(keys_NGD, rotation).transpose(0, 1), values_NGD.transpose(0, 1))

    def _logits(self, out_BJC: Tensor) -> Tensor:
        head_logits_BJM = self.layer.times("head_MC", out_BJC).float()
        logits_BJV = torch.full(
            (*head_logits_BJM.shape[:2], self.config.vocab_size), EXCLUDED_LOGIT, device=head_logits_BJM.device
        )
        return logits_BJV.index_copy_(2, self._tokens_M, head_logits_BJM)

    def _on_device(self, slots: Ints) -> Tensor:
        return to_device(slots, self._device)


def token_slots(batch: ForwardBatch, counts_B: Ints) -> tuple[Ints, Ints]:
    """Return the slots (N) of a pass's tokens, row after row, and the slots (N) of the tokens before them.

    A text's first token has slot 0 before it.
    """
    token_slots_by_row = [ints([])]
    previous_slots_by_row = [ints([])]
    for table, start, count in zip(batch.tables, batch.positions, counts_B.tolist(), strict=True):
        if count:
            first_position = max(start - 1, 0)
            pages_P = ints(table[first_position // PAGE : (start + count - 1) // PAGE + 1])
            positions_N = np.arange(first_position, start + count)
            slots_N = pages_P[positions_N // PAGE - first_position // PAGE] * PAGE + positions_N % PAGE
            token_slots_by_row.append(slots_N[-count:])
            previous_slots_by_row.append(slots_N[:-1] if start else np.append(0, slots_N[:-1]))
    return np.concatenate(token_slots_by_row), np.concatenate(previous_slots_by_row)


def _padded(slots_N: Ints, counts_B: Ints, width: int) -> Ints:
    """Return slots (N) as rows (B, width), padded with 0."""
    slots_BT = np.zeros((len(counts_B), width), dtype=np.int64)
    slots_BT[np.arange(width) < counts_B[:, None]] = slots_N
    return slots_BT

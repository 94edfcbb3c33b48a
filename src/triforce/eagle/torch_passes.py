"""Passes of an EAGLE head in torch, on any kernels of KV memory: the reference of the native passes.

Shape suffixes as in eagle/eagle_draft.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.arrays import Array, DType, on_device, to_host
from triforce.backends.kernel_api import ForwardBatch
from triforce.backends.torch.model import linear, norm
from triforce.backends.torch.rotation import RopeTensors, rotate
from triforce.backends.torch.tensors import as_tensor, tensor_of, torch_dtype
from triforce.eagle.head import EagleHeadConfig, EagleHeadWeights, EntryMemory
from triforce.eagle.slots import token_slots
from triforce.ragged import Ints, ints


def eagle_head_tensors(weights: EagleHeadWeights, dtype: DType, device: str) -> EagleHeadWeights:
    """Return the weights as tensors of this dtype on a device."""
    named = {field.name: getattr(weights, field.name) for field in fields(weights)}
    tensors = {
        name: tensor_of(weight, device).to(torch_dtype(dtype))
        for name, weight in named.items()
        if weight is not None and name != "tokens_M"
    }
    return replace(weights, **tensors, tokens_M=tensor_of(weights.tokens_M, device))


class Entries(NamedTuple):
    """Rotated keys (B, K, G, D) of entries, their values (B, K, G, D), and their slots (B, K); -1: padding.

    Entries of sinks come first.
    """

    keys_BKGD: Tensor
    values_BKGD: Tensor
    slots_BK: Tensor

    def followed_by(self, other: Entries) -> Entries:
        """Return these entries followed by `other`."""
        return Entries(*(torch.cat(tensors, 1) for tensors in zip(self, other, strict=True)))


class EagleHeadLayer:
    """The head's layer without the embedding, as functions of tensors in `stream_dtype`, the dtype of the norms."""

    def __init__(self, config: EagleHeadConfig, weights: EagleHeadWeights) -> None:
        self.config = config
        self.weights = weights
        self.stream_dtype = weights.norm_C.dtype
        self.rope = RopeTensors(config.rope, weights.norm_C.device)

    def fuse(self, states_BTX: Tensor) -> Tensor:
        """Return the fused states of the target, (B, T, C); a state of zeros gives zeros."""
        norms_SC = self.weights.fc_norm_SC
        if norms_SC is not None:
            states_BTSC = states_BTX.view(*states_BTX.shape[:2], *norms_SC.shape)
            normed = [norm(states_BTSC[..., s, :], norms_SC[s], self.config.norm_eps) for s in range(len(norms_SC))]
            states_BTX = torch.cat(normed, -1)
        return self.project("fc_CX", states_BTX)

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
            x_BNC = x_BNC + self.project("embedding_proj_CC", embedding_BNC)
        x_BNC = x_BNC + self.project("o_proj_CQ", attn_out_BNQ)
        x_BNC = x_BNC + self.project("down_proj_CI", self._gated(x_BNC))
        out_BNC = norm(x_BNC, weights.norm_C, config.norm_eps)
        return out_BNC, out_BNC if config.norm_output else x_BNC

    def project(self, weight: str, x: Tensor) -> Tensor:
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
        each item of `chain`: an item has the entries (B, N) of one earlier draft step. The query also attends to its
        own entry where `context` lacks it, that is, where `last_BN` is below the query's slot.
        """
        inputs_BNE = self.inputs(fused_BNC, embeddings_BNC)
        entries = self._entries(inputs_BNE, slots_BN)
        chain = [*chain, entries] if len(chain) or bool((last_BN < slots_BN).any()) else []
        attn_out_BNQ = self._attend(self.queries(inputs_BNE), slots_BN, context, last_BN, chain)
        return *self.finish(fused_BNC, inputs_BNE, attn_out_BNQ), entries

    def _gated(self, x_BNC: Tensor) -> Tensor:
        y_BNC = norm(x_BNC, self.weights.post_norm_C, self.config.norm_eps)
        return F.silu(self.project("gate_proj_IC", y_BNC)) * self.project("up_proj_IC", y_BNC)

    def _entries(self, inputs_BTE: Tensor, slots_BT: Tensor) -> Entries:
        k_BTGD, v_BTGD = self.keys_values(inputs_BTE)
        return Entries(rotate(k_BTGD, self.rope.cos_sin(slots_BT)), v_BTGD, slots_BT)

    def _heads(self, weight: str, inputs_BTE: Tensor) -> Tensor:
        return self.project(weight, inputs_BTE).view(*inputs_BTE.shape[:2], -1, self.config.head_dim)

    def _attend(
        self, q_BNHD: Tensor, slots_BN: Tensor, context: Entries, last_BN: Tensor, chain: Sequence[Entries]
    ) -> Tensor:
        """Return the attention output (B, N, Q). Queries attend to sinks from their place in [sinks | window].

        See `StreamingView` for these places.
        """
        config = self.config
        (N, D) = q_BNHD.shape[1::2]
        keys, values = (torch.cat([tensor[i] for tensor in (context, *chain)], 1).transpose(1, 2) for i in (0, 1))
        own_entry_BNN = torch.eye(N, dtype=torch.bool, device=keys.device).expand(len(keys), -1, -1)
        visible_BNK = torch.cat(
            [self._visible(context.slots_BK, slots_BN, last_BN), *(own_entry_BNN for _ in chain)], 2
        )
        q = rotate(q_BNHD, self.rope.cos_sin(slots_BN)).transpose(1, 2)
        if bool((slots_BN >= config.sinks + config.window).any()):
            # One product serves two rotations of a query: [true position | place in [sinks | window]]. A key becomes
            # [key | 0], a key of a sink [0 | key]. So sinks meet the second rotation, other entries the first.
            # Entries of `chain` become [key | 0]: they lie in the window, or are sinks of a query whose place in
            # [sinks | window] is its true position.
            far_queries = rotate(q_BNHD, self.rope.cos_sin(slots_BN.clamp_max(config.sinks + config.window - 1)))
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
    """Passes in torch, on `device`. The memory and the embedding may be native: their arrays become tensors here.

    embed: the target's embedding, from ids (N) to (N, C). weights: with rows of an output head, of any dtype.
    """

    def __init__(
        self,
        config: EagleHeadConfig,
        weights: EagleHeadWeights,
        embed: Callable[[Ints], Array],
        dtype: DType,
        device: str = "cpu",
    ) -> None:
        self.config = config
        tensors = eagle_head_tensors(weights, dtype, device)
        self.layer = EagleHeadLayer(config, tensors)
        self._embed = embed
        self.weight_size = self.layer.stream_dtype.itemsize
        self._tokens_M = tensors.tokens_M
        self._device = device

    @torch.no_grad()
    def forward(self, ids_BT: Ints, memory: EntryMemory, batch: ForwardBatch, at_BJ: Ints) -> Array:
        """Return logits of columns `at_BJ`, float32 (B, J, V). Each row's last output becomes its last slot's state."""
        B, T = ids_BT.shape
        on_host = isinstance(memory.states_NC, np.ndarray)
        memory_states_NC = as_tensor(memory.states_NC)
        counts_B = ints(batch.views[0][1].counts)
        slots_BT, previous_slots_BT = (_padded(slots_N, counts_B, T) for slots_N in token_slots(batch, counts_B))
        fused_BTC = memory_states_NC[self._on_device(previous_slots_BT)].to(self.layer.stream_dtype)
        inputs_BTE = self.layer.inputs(fused_BTC, as_tensor(self._embed(ids_BT.reshape(-1))).view(B, T, -1))
        qkv = self.layer.queries(inputs_BTE), *self.layer.keys_values(inputs_BTE)
        attention = memory.kv.layer_attention(batch, T)
        attn_out_BTHD = as_tensor(attention(0, *(map(to_host, qkv) if on_host else qkv))[1])
        attn_out_BTQ = attn_out_BTHD.flatten(2).to(self.layer.stream_dtype)
        out_BTC, states_BTC = self.layer.finish(fused_BTC, inputs_BTE, attn_out_BTQ)
        live_B = counts_B > 0
        last_B = np.maximum(counts_B - 1, 0)
        end_slots_B, last_column_B, live_row_B = (
            self._on_device(index_B)
            for index_B in (slots_BT[live_B, last_B[live_B]], last_B[live_B], live_B.nonzero()[0])
        )
        memory_states_NC[end_slots_B] = states_BTC[live_row_B, last_column_B].to(memory_states_NC.dtype)
        logits_BJV = self._logits(out_BTC.take_along_dim(self._on_device(at_BJ)[..., None], dim=1))
        return to_host(logits_BJV) if on_host else logits_BJV

    @torch.no_grad()
    def record_entries(
        self, ids_N: Ints, memory: EntryMemory, slots: tuple[Ints, Ints, Ints], columns_N: Ints, states_SBTC: Array
    ) -> None:
        """Write states and entries of tokens of the target's pass, as `EagleHeadPasses.record_entries` says."""
        positions_N, token_slots_N, previous_slots_N = (self._on_device(index_N) for index_N in slots)
        memory_states_NC = as_tensor(memory.states_NC)
        states_SNC = as_tensor(states_SBTC).flatten(1, 2)[:, self._on_device(columns_N)]
        fused_NC = self.layer.fuse(states_SNC.transpose(0, 1).flatten(1)[None].to(self.layer.stream_dtype))[0]
        memory_states_NC[token_slots_N] = fused_NC.to(memory_states_NC.dtype)
        fused_1NC = memory_states_NC[previous_slots_N][None].to(self.layer.stream_dtype)
        inputs_1NE = self.layer.inputs(fused_1NC, as_tensor(self._embed(ids_N))[None])
        keys_NGD, values_NGD = (tensor[0] for tensor in self.layer.keys_values(inputs_1NE))
        rotated_NGD = rotate(keys_NGD, self.layer.rope.cos_sin(positions_N))
        written_GND = rotated_NGD.transpose(0, 1), values_NGD.transpose(0, 1)
        if isinstance(memory.states_NC, np.ndarray):
            memory.kv.write(0, slots[1], *map(to_host, written_GND))
        else:
            memory.kv.write(0, token_slots_N, *written_GND)

    def _logits(self, out_BJC: Tensor) -> Tensor:
        head_logits_BJM = self.layer.project("head_MC", out_BJC).float()
        logits_BJV = torch.full(
            (*head_logits_BJM.shape[:2], self.config.vocab_size), EXCLUDED_LOGIT, device=head_logits_BJM.device
        )
        return logits_BJV.index_copy_(2, self._tokens_M, head_logits_BJM)

    def _on_device(self, slots: Ints) -> Tensor:
        on_device_N: Tensor = on_device(slots, self._device)
        return on_device_N


def _padded(slots_N: Ints, counts_B: Ints, width: int) -> Ints:
    """Return slots (N) as rows (B, width), padded with 0."""
    slots_BT = np.zeros((len(counts_B), width), dtype=np.int64)
    slots_BT[np.arange(width) < counts_B[:, None]] = slots_N
    return slots_BT

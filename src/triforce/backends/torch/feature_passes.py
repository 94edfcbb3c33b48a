"""Passes of a feature draft on any kernels of KV memory: the reference of native ones.

Shape suffixes as in backends/feature_draft.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from triforce.backends.feature_api import EntryMemory
from triforce.backends.kernel_api import PAGE, ForwardBatch
from triforce.backends.torch.feature_layer import FeatureLayer
from triforce.model.feature_draft import FeatureDraftConfig, FeatureDraftWeights
from triforce.model.rope import rotate
from triforce.ragged import Ints, ints, to_device

NEVER = -1e5
"""Logit of a token that the draft cannot propose. Finite, so that there is a law where a grammar allows no other."""


class TorchFeaturePasses:
    """embed: the target's, from ids (N) to (N, C). weights: with a head."""

    def __init__(
        self, config: FeatureDraftConfig, weights: FeatureDraftWeights, embed: Callable[[Tensor], Tensor]
    ) -> None:
        self.config, self.layer, self._embed = config, FeatureLayer(config, weights), embed
        self.weight_size = self.layer.stream.itemsize
        self._tokens_M, self._device = weights.tokens_M, weights.tokens_M.device

    def forward(self, ids_BT: Tensor, memory: EntryMemory, batch: ForwardBatch, at_BJ: Tensor) -> Tensor:
        """Return logits of columns `at_BJ`, float32 (B, J, V). A row's last output is kept as a state."""
        (B, T), counts_B = ids_BT.shape, ints(batch.views[0][1].counts)
        own_BT, before_BT = (_padded(slots_N, counts_B, T) for slots_N in token_slots(batch, counts_B))
        fused_BTC = memory.states_NC[self._on_device(before_BT)].to(self.layer.stream)
        inputs_BTE = self.layer.inputs(fused_BTC, self._embed(ids_BT.flatten()).view(B, T, -1))
        qkv = self.layer.queries(inputs_BTE), *self.layer.keys_values(inputs_BTE)
        attn_out_BTQ = memory.kv.layer_attention(batch, T)(0, *qkv)[1].flatten(2).to(self.layer.stream)
        out_BTC, states_BTC = self.layer.finish(fused_BTC, inputs_BTE, attn_out_BTQ)
        live_B, last_B = counts_B > 0, np.maximum(counts_B - 1, 0)
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
    own, before = [ints([])], [ints([])]
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

"""A feature draft beside its target: entries made of what the target's passes compute, and guesses that go by them.

Of each slot a `FeatureMemory` holds an entry, made of the slot's token and the state behind the slot before; and the
state behind the slot, which is that of the target's latest pass over it, or of the guess there. Slot 0 of the scratch
page has a state of zeros for good: the one before a text.

Shape suffixes: B rows, T tokens fed, N tokens of all rows, J scored columns, V vocabulary, C hidden size, S states of a
token, X = S * C, M tokens that can be proposed.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from triforce.backends import dispatch
from triforce.backends.current_device import current
from triforce.backends.decoder import Decoder, View
from triforce.backends.kernel_api import PAGE, ForwardBatch, KVBackend
from triforce.model.feature_draft import FeatureDraftConfig, FeatureDraftWeights
from triforce.model.rope import rotate
from triforce.ragged import Ints, columns, ints, to_device

NEVER = -1e5
"""Logit of a token that the draft cannot propose. Finite, so that there is a law where a grammar allows no other."""


class EntryMemory(Protocol):
    """Entries (one layer's keys and values) and states (slots, C) of the slots of a pool."""

    kv: KVBackend
    states_NC: Tensor


class EntryView(View, Protocol):
    """Rows of such a memory, as the draft sees them."""

    @property
    def memory(self) -> EntryMemory: ...


class FeatureDraft:
    """The draft on kernels. weights: with a head. target: of which it reads the embedding.

    Called as a model of its tier, of the view's latest tokens, it returns their logits.
    """

    def __init__(self, config: FeatureDraftConfig, weights: FeatureDraftWeights, target: Decoder) -> None:
        self.config, self.target, self.tokens_M = config, target, weights.tokens_M.to(target.device)
        self.layer = dispatch.feature_layer(config, weights, target.dtype, target.device)
        trained = sum(tensor.numel() for _, tensor in weights.trained())
        self.weights_read = trained + config.choices * config.hidden_size
        """Weights that a pass multiplies with."""

    @torch.no_grad()
    def __call__(self, ids_BT: Tensor, counts_B: Ints, cache: EntryView, at_BJ: Tensor) -> Tensor:
        """One pass: logits of columns `at_BJ`, float32 (B, J, V). A row's last output is kept as a state."""
        (B, T), memory, live_B = ids_BT.shape, cache.memory, counts_B > 0
        with current(self.target.device):
            batch = cache.begin(counts_B, T)
            own_BT, before_BT = (_padded(slots_N, counts_B, T) for slots_N in token_slots(batch, counts_B))
            fused_BTC = memory.states_NC[self._on_device(before_BT)].to(self.layer.stream)
            inputs_BTE = self.layer.inputs(fused_BTC, self.target.model.embed(ids_BT.flatten()).view(B, T, -1))
            qkv = self.layer.queries(inputs_BTE), *self.layer.keys_values(inputs_BTE)
            attn_out_BTHD = cache.kv.layer_attention(batch, T)(0, *qkv)[1]
            out_BTC, states_BTC = self.layer.finish(fused_BTC, inputs_BTE, attn_out_BTHD.flatten(2))
            last_B = np.maximum(counts_B - 1, 0)
            ends = [self._on_device(own_BT[live_B, last_B[live_B]]), torch.from_numpy(last_B[live_B])]
            of_B = torch.from_numpy(live_B.nonzero()[0])
            memory.states_NC[ends[0]] = states_BTC[of_B, ends[1]].to(memory.states_NC.dtype)
            return self._logits(out_BTC.take_along_dim(at_BJ[..., None].to(out_BTC.device), dim=1))

    @torch.no_grad()
    def note(self, memory: EntryMemory, batch: ForwardBatch, ids_BT: Tensor, states_SBTC: Tensor) -> None:
        """Make the entries of the tokens of a pass of the target, of their states, and of the one before each row."""
        counts_B = ints(batch.views[0][1].counts)
        own_N, before_N = (self._on_device(slots_N) for slots_N in token_slots(batch, counts_B))
        fed_BT = torch.from_numpy(np.arange(ids_BT.shape[1]) < counts_B[:, None])
        positions_N = torch.from_numpy(columns(ints(batch.positions), ids_BT.shape[1]))[fed_BT]
        states_1NX = states_SBTC[:, fed_BT.to(states_SBTC.device)].transpose(0, 1).flatten(1)[None]
        memory.states_NC[own_N] = self.layer.fuse(states_1NX)[0].to(memory.states_NC.dtype)
        fused_1NC = memory.states_NC[before_N][None].to(self.layer.stream)
        inputs_1NE = self.layer.inputs(fused_1NC, self.target.model.embed(ids_BT[fed_BT])[None])
        keys_NGD, values_NGD = (each[0] for each in self.layer.keys_values(inputs_1NE))
        rotation = self.config.rope.cos_sin(self._on_device(positions_N.numpy()))
        memory.kv.write(0, own_N, rotate(keys_NGD, rotation).transpose(0, 1), values_NGD.transpose(0, 1))

    def _logits(self, out_BJC: Tensor) -> Tensor:
        few_BJM = self.layer.times("head_MC", out_BJC).float()
        shape = *few_BJM.shape[:2], self.target.config.vocab_size
        return torch.full(shape, NEVER, device=few_BJM.device).index_copy_(2, self.tokens_M, few_BJM)

    def _on_device(self, slots: Ints) -> Tensor:
        return to_device(slots, self.target.device)


class NotingDecoder:
    """A target as tiers run it above a feature draft: each pass leaves entries of its tokens in the draft's memory."""

    def __init__(self, decoder: Decoder, draft: FeatureDraft, memory: EntryMemory) -> None:
        self.decoder, self.draft, self.memory = decoder, draft, memory

    def __call__(self, ids_BT: Tensor, counts_B: Ints, cache: View, at_BJ: Tensor) -> Tensor:
        """Do what `Decoder` does."""
        batch, output = self.decoder.observe(ids_BT, counts_B, cache, at_BJ, self.draft.config.state_layers)
        assert output.states_SBTC is not None
        with current(self.decoder.device):
            self.draft.note(self.memory, batch, ids_BT, output.states_SBTC)
        return output.logits_BJV


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

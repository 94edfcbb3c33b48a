"""Passes of an EAGLE head in one native call each, or several draft steps in one call.

A row's bits depend on that row alone.

Shape suffixes as in eagle/eagle_draft.py; K drafted tokens.
"""

from __future__ import annotations

import numpy as np

from triforce.arrays import Array, DType, rounded
from triforce.backends.cpu import _native
from triforce.backends.cpu.kv import NativeKV, rotations
from triforce.backends.cpu.model import Draws, NativeEmbedding, native_view
from triforce.backends.kernel_api import ForwardBatch
from triforce.eagle.head import EagleHeadConfig, EagleHeadWeights, EntryMemory
from triforce.model.rope import BLOCK
from triforce.ragged import Bools, Ints
from triforce.sampling import non_finite_logits

BF16_WEIGHT_BITS = 8
"""Bits of the head's weights if the target's are bfloat16. This halves the reads, and drafts need not be exact."""


class NativeEagleHeadPasses:
    """Native passes. The residual stream is float32; inputs of products, entries and states are of `dtype`.

    target: gives the embedding. Raises ModelError for weights that cannot be packed.
    """

    def __init__(
        self, config: EagleHeadConfig, weights: EagleHeadWeights, target: NativeEmbedding, dtype: DType
    ) -> None:
        assert weights.head_MC is not None, "an EAGLE head that runs has rows of an output head"
        self.config = config
        matrices: dict[str, Array] = {
            "fc": weights.fc_CX, "q_proj": weights.q_proj_QE, "k_proj": weights.k_proj_PE, "v_proj": weights.v_proj_PE,
            "o_proj": weights.o_proj_CQ, "gate_proj": weights.gate_proj_IC, "up_proj": weights.up_proj_IC,
            "down_proj": weights.down_proj_CI, "head": weights.head_MC,
        }  # fmt: skip
        typed = {name: np.ascontiguousarray(rounded(weight, dtype)) for name, weight in matrices.items()}
        proj_CC = weights.embedding_proj_CC
        self._native = _native.EagleHead(
            embedding=target.embedding, **typed,
            embedding_proj=None if proj_CC is None else np.ascontiguousarray(rounded(proj_CC, dtype)),
            embedding_norm=weights.embedding_norm_C, hidden_norm=weights.hidden_norm_C,
            post_norm=weights.post_norm_C, norm=weights.norm_C, fc_norm=weights.fc_norm_SC,
            tokens=weights.tokens_M.tolist(), head_dim=config.head_dim, eps=config.norm_eps,
            norm_output=config.norm_output, norm_before_residual=config.norm_before_residual,
            bits=BF16_WEIGHT_BITS if dtype == "bfloat16" else 0,
        )  # fmt: skip
        self.weight_size = 1 if dtype == "bfloat16" else 4

    def forward(self, ids_BT: Ints, memory: EntryMemory, batch: ForwardBatch, at_BJ: Ints) -> Array:
        """Return logits of columns `at_BJ`, float32 (B, J, V). Each row's last output becomes its last slot's state."""
        cos, sin = rotations(self.config.rope, batch, ids_BT.shape[1])
        logits_BJV = np.empty((*at_BJ.shape, self.config.vocab_size), np.float32)
        ((_, page_table),) = batch.views
        self._native.forward(
            entries=_pages(memory), states=memory.states_NC, ids=np.ascontiguousarray(ids_BT),
            positions=batch.positions, counts=page_table.counts, cos=cos, sin=sin, view=_view(memory, batch),
            at=np.ascontiguousarray(at_BJ),
            logits=logits_BJV,
        )  # fmt: skip
        return logits_BJV

    def record_entries(
        self, ids_N: Ints, memory: EntryMemory, slots: tuple[Ints, Ints, Ints], columns_N: Ints, states_SBTC: Array
    ) -> None:
        """Write states and entries of tokens of the target's pass, as `EagleHeadPasses.record_entries` says."""
        positions_N, token_slots_N, previous_slots_N = slots
        states_SNC = states_SBTC.reshape(len(states_SBTC), -1, states_SBTC.shape[-1])
        cos, sin = self.config.rope.tables((np.unique(positions_N // BLOCK) * BLOCK).tolist(), 1)
        self._native.note(
            entries=_pages(memory), states=memory.states_NC, ids=np.ascontiguousarray(ids_N), positions=positions_N,
            slots=token_slots_N, before=previous_slots_N, columns=columns_N, passed=states_SNC,
            cos=cos, sin=sin,
        )  # fmt: skip

    def fused_draft(
        self, memory: EntryMemory, batch: ForwardBatch, texts: tuple[Ints, Ints, Bools], draws: Draws, tokens_BK: Ints
    ) -> Array:
        """Draft several tokens a row, as `NativeModel.fused_draft` does. Returns their distributions (B, K, V)."""
        sampler, noise, probs_KBV = draws
        ids_BS, lengths_B, live_B = texts
        longest = int((lengths_B - np.array(batch.positions)).max()) + tokens_BK.shape[1]
        cos, sin = rotations(self.config.rope, batch, longest)
        drafted = _native.DraftedTexts(
            positions=batch.positions, cos=cos, sin=sin, view=_view(memory, batch), ids=ids_BS, lengths=lengths_B,
            live=live_B, sampler=sampler, noise=noise, probs=probs_KBV, tokens=tokens_BK,
        )  # fmt: skip
        fault = self._native.fused_draft(entries=_pages(memory), states=memory.states_NC, texts=drafted)
        if fault:
            raise non_finite_logits(fault[0], 0, fault[1])
        return probs_KBV.swapaxes(0, 1)


def _kv(memory: EntryMemory) -> NativeKV:
    assert isinstance(memory.kv, NativeKV), "native passes go with native memory"
    return memory.kv


def _pages(memory: EntryMemory) -> _native.Pages:
    (pages,) = _kv(memory).native_pages
    return pages


def _view(memory: EntryMemory, batch: ForwardBatch) -> _native.View:
    ((layers, page_table),) = batch.views
    return native_view(_kv(memory), layers, page_table)

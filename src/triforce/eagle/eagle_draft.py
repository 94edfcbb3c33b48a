"""An EAGLE head beside its target: entries from the target's hidden states, and draft tokens that attend to them.

For each slot an `EagleHeadMemory` holds an entry, the K and V that the head computes from the slot's token and the
state of the slot before. It also holds the slot's state: that of the target's latest pass over the slot, or that of the
head's own pass if the slot's token is a draft token. A rejected token needs no undo: the next pass over its slot writes
entry and state anew. Slot 0 of the scratch page always has a state of zeros, the state before a text.

Shape suffixes: B rows, T tokens fed, N tokens of all rows, J scored columns, V vocabulary, C hidden size, S states of a
token, X = S * C, M tokens that can be proposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from triforce.arrays import Array, DType, dtype_name
from triforce.backends import dispatch
from triforce.backends.current_device import device_context
from triforce.backends.decoder import Decoder, View
from triforce.backends.dispatch import FusedDraft
from triforce.backends.kernel_api import PAGE, Embedder, ForwardBatch
from triforce.eagle.head import EagleHeadConfig, EagleHeadPasses, EagleHeadWeights, EntryMemory
from triforce.eagle.slots import token_slots
from triforce.model.config import ModelConfig
from triforce.model.weights import Matrix, Weights
from triforce.ragged import Ints, columns, ints


def embedding(config: ModelConfig, table_VC: Matrix, device: str) -> Embedder:
    """Return a model's whole embedding, for a rank that has only a part of the model. Raises ModelError."""
    dtype = dtype_name(table_VC)
    if dispatch.suits_native(config.head_dim, dtype, device):
        from triforce.backends.cpu.model import NativeEmbedding

        return NativeEmbedding(config, table_VC, dtype)
    return dispatch.model(config, Weights(table_VC, (), np.empty(0, np.float32), table_VC), device)


def eagle_head_passes(
    config: EagleHeadConfig, weights: EagleHeadWeights, target: Embedder, dtype: DType, device: str
) -> EagleHeadPasses:
    """Return the passes of an EAGLE head for a target, on the fastest kernels that take it.

    weights: of any dtype.
    """
    if dispatch.suits_native(config.head_dim, dtype, device):
        from triforce.backends.cpu.model import NativeEmbedding
        from triforce.eagle.native_passes import NativeEagleHeadPasses

        if isinstance(target, NativeEmbedding):
            if config.hidden_size % 16 == 0 and config.sinks % PAGE == 0:
                return NativeEagleHeadPasses(config, weights, target, dtype)
            dtype = "float32"  # the type of native memories and native embeddings
    dispatch.require_torch("EAGLE heads that native kernels do not take")
    from triforce.eagle.torch_passes import TorchEagleHeadPasses

    return TorchEagleHeadPasses(config, weights, target.embed, dtype, device)


def fused_eagle_draft_with(passes: EagleHeadPasses, memory: EntryMemory) -> FusedDraft | None:
    """Return `NativeEagleHeadPasses.fused_draft` bound to this memory; None for other passes."""
    if dispatch.native:
        from triforce.eagle.native_passes import NativeEagleHeadPasses

        if isinstance(passes, NativeEagleHeadPasses):
            return partial(passes.fused_draft, memory)
    return None


class EntryView(View, Protocol):
    """View of rows of an EAGLE head's memory."""

    @property
    def memory(self) -> EntryMemory: ...


class EagleHead:
    """An EAGLE head that runs on kernels. It is called as the model of a tier.

    weights: with rows of an output head. embedding_VC: the target's whole embedding, if this rank's `target` has only a
    part; None: `target` has the whole.
    """

    def __init__(
        self,
        config: EagleHeadConfig,
        weights: EagleHeadWeights,
        target: Decoder,
        embedding_VC: Matrix | None = None,
    ) -> None:
        self.config = config
        self.target = target
        run_config = replace(
            config, vocab_size=target.config.vocab_size
        )  # some published heads have a padded vocabulary
        embedder: Embedder = target.model
        if embedding_VC is not None:
            embedder = embedding(target.config, embedding_VC, target.device)
        self.passes = eagle_head_passes(run_config, weights, embedder, target.dtype, target.device)
        trained = sum(weight.size for _, weight in weights.trained_tensors())
        self.weights_read = trained + config.draft_vocab_size * config.hidden_size
        """Count of weights that a pass reads, `weight_size` bytes each."""
        self.weight_size = self.passes.weight_size

    def __call__(self, ids_BT: Ints, counts_B: Ints, cache: EntryView, at_BJ: Ints) -> Array:
        """Run one pass. Returns logits of columns `at_BJ`, float32 (B, J, V).

        Each row's last output becomes the state of its last slot.
        """
        with device_context(self.target.device):
            batch = cache.begin(counts_B, ids_BT.shape[1])
            logits_BJV = self.passes.forward(ids_BT, cache.memory, batch, at_BJ)
            cache.record(batch)
        return logits_BJV

    def record_entries(self, memory: EntryMemory, batch: ForwardBatch, ids_BT: Ints, states_SBTC: Array) -> None:
        """Write the states and entries of the tokens of a target's pass. states_SBTC: the pass's hidden states."""
        counts_B = ints(batch.views[0][1].counts)
        T = ids_BT.shape[1]
        token_slots_N, previous_slots_N = token_slots(batch, counts_B)
        columns_N = np.flatnonzero(np.arange(T) < counts_B[:, None])
        positions_N = columns(ints(batch.positions), T).flatten()[columns_N]
        ids_N = ids_BT.reshape(-1)[columns_N]
        if len(token_slots_N):
            self.passes.record_entries(
                ids_N, memory, (positions_N, token_slots_N, previous_slots_N), columns_N, states_SBTC
            )


class EntryRecordingDecoder:
    """A target whose passes write the states and entries of their tokens to an EAGLE head's memory."""

    def __init__(self, decoder: Decoder, draft: EagleHead, memory: EntryMemory) -> None:
        self.decoder = decoder
        self.draft = draft
        self.memory = memory

    def __call__(self, ids_BT: Ints, counts_B: Ints, cache: View, at_BJ: Ints) -> Array:
        """Run a pass as `Decoder.__call__` does, and write its entries. Returns the logits."""
        batch, output = self.decoder.observe(ids_BT, counts_B, cache, at_BJ, self.draft.config.state_layers)
        assert output.states_SBTC is not None
        with device_context(self.decoder.device):
            self.draft.record_entries(self.memory, batch, ids_BT, output.states_SBTC)
        return output.logits_BJV

    def read(self, ids_1T: Ints, counts_1: Ints, cache: View) -> Iterator[int]:
        """Read a prompt as `Decoder.read` does, and write its entries."""
        layers = self.draft.config.state_layers
        batch, output = yield from self.decoder.observe_parts(ids_1T, counts_1, cache, layers)
        assert output.states_SBTC is not None
        with device_context(self.decoder.device):
            self.draft.record_entries(self.memory, batch, ids_1T, output.states_SBTC)

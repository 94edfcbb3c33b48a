"""An EAGLE head beside its target: entries made of what the target's passes compute, and guesses that go by them.

Of each slot a `EagleHeadMemory` holds an entry, made of the slot's token and the state behind the slot before; and the
state behind the slot, which is that of the target's latest pass over it, or of the guess there. Slot 0 of the scratch
page has a state of zeros for good: the one before a text.

Shape suffixes: B rows, T tokens fed, N tokens of all rows, J scored columns, V vocabulary, C hidden size, S states of a
token, X = S * C, M tokens that can be proposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from triforce.backends import dispatch
from triforce.backends import dispatch as backends_dispatch
from triforce.backends.current_device import current
from triforce.backends.decoder import Decoder, View
from triforce.backends.dispatch import FusedDraft
from triforce.backends.kernel_api import PAGE, Device, Embedder, ForwardBatch
from triforce.eagle.head import EagleHeadConfig, EagleHeadPasses, EagleHeadWeights, EntryMemory
from triforce.eagle.torch_passes import TorchEagleHeadPasses, token_slots
from triforce.model.config import ModelConfig
from triforce.model.weights import Matrix, Weights
from triforce.ragged import Ints, columns, ints


def embedding(config: ModelConfig, table_VC: Matrix, device: torch.device) -> Embedder:
    """Return a model's embedding alone, whole, for who has a part of the model only. Raises ModelError."""
    if dispatch.suits_native(config.head_dim, table_VC.dtype, device):
        from triforce.backends.cpu.model import NativeEmbedding

        return NativeEmbedding(config, table_VC, table_VC.dtype)
    return dispatch.model(config, Weights(table_VC, (), torch.empty(0, device=device), table_VC))


def eagle_head_passes(
    config: EagleHeadConfig, weights: EagleHeadWeights, target: Embedder, dtype: torch.dtype, device: Device
) -> EagleHeadPasses:
    """Passes of an EAGLE head for this target, by the fastest kernels that take it; weights of any type, anywhere."""
    if dispatch.suits_native(config.head_dim, dtype, torch.device(device)):
        from triforce.backends.cpu.model import NativeEmbedding
        from triforce.eagle.native_passes import NativeEagleHeadPasses

        if isinstance(target, NativeEmbedding):
            if config.hidden_size % 16 == 0 and config.sinks % PAGE == 0:
                return NativeEagleHeadPasses(config, weights, target, dtype)
            dtype = torch.float32  # of what native memories take and native embeddings give
    return TorchEagleHeadPasses(config, weights.to(dtype, device), target.embed)


def fused_eagle_draft_with(passes: EagleHeadPasses, memory: EntryMemory) -> FusedDraft | None:
    """`NativeEagleHeadPasses.fused_draft` with this memory; None for other passes."""
    if backends_dispatch.native:
        from triforce.eagle.native_passes import NativeEagleHeadPasses

        if isinstance(passes, NativeEagleHeadPasses):
            return partial(passes.fused_draft, memory)
    return None


class EntryView(View, Protocol):
    """Rows of such a memory, as the draft sees them."""

    @property
    def memory(self) -> EntryMemory: ...


class EagleHead:
    """The draft on kernels. weights: with a head. target: gives the embedding, or else `embedding_VC` does.

    Called as a model of its tier, of the view's latest tokens, it returns their logits.
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
        own = replace(config, vocab_size=target.config.vocab_size)  # some published ones are padded
        whole: Embedder = target.model
        if embedding_VC is not None:
            whole = embedding(target.config, embedding_VC, target.device)
        self.passes = eagle_head_passes(own, weights, whole, target.dtype, target.device)
        trained = sum(tensor.numel() for _, tensor in weights.trained())
        self.weights_read = trained + config.choices * config.hidden_size
        """Weights that a pass multiplies with, of which each has so many bytes: `weight_size`."""
        self.weight_size = self.passes.weight_size

    @torch.no_grad()
    def __call__(self, ids_BT: Tensor, counts_B: Ints, cache: EntryView, at_BJ: Tensor) -> Tensor:
        """One pass: logits of columns `at_BJ`, float32 (B, J, V). A row's last output is kept as a state."""
        with current(self.target.device):
            batch = cache.begin(counts_B, ids_BT.shape[1])
            logits_BJV = self.passes.forward(ids_BT, cache.memory, batch, at_BJ)
            cache.record(batch)
        return logits_BJV

    @torch.no_grad()
    def note(self, memory: EntryMemory, batch: ForwardBatch, ids_BT: Tensor, states_SBTC: Tensor) -> None:
        """Make the entries of the tokens of a pass of the target, of their states, and of the one before each row."""
        counts_B = ints(batch.views[0][1].counts)
        T = ids_BT.shape[1]
        own_N, before_N = token_slots(batch, counts_B)
        columns_N = np.flatnonzero(np.arange(T) < counts_B[:, None])
        positions_N = columns(ints(batch.positions), T).flatten()[columns_N]
        ids_N = ids_BT.flatten()[torch.from_numpy(columns_N)]
        if len(own_N):
            self.passes.note(ids_N, memory, (positions_N, own_N, before_N), columns_N, states_SBTC)


class EntryRecordingDecoder:
    """A target as tiers run it above an EAGLE head: each pass leaves entries of its tokens in the draft's memory."""

    def __init__(self, decoder: Decoder, draft: EagleHead, memory: EntryMemory) -> None:
        self.decoder = decoder
        self.draft = draft
        self.memory = memory

    def __call__(self, ids_BT: Tensor, counts_B: Ints, cache: View, at_BJ: Tensor) -> Tensor:
        """Do what `Decoder` does."""
        batch, output = self.decoder.observe(ids_BT, counts_B, cache, at_BJ, self.draft.config.state_layers)
        assert output.states_SBTC is not None
        with current(self.decoder.device):
            self.draft.note(self.memory, batch, ids_BT, output.states_SBTC)
        return output.logits_BJV

    def read(self, ids_1T: Tensor, counts_1: Ints, cache: View) -> Iterator[int]:
        """Do what `Decoder.read` does."""
        layers = self.draft.config.state_layers
        batch, output = yield from self.decoder.observe_parts(ids_1T, counts_1, cache, layers)
        assert output.states_SBTC is not None
        with current(self.decoder.device):
            self.draft.note(self.memory, batch, ids_1T, output.states_SBTC)

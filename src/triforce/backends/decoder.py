"""The Llama-family decoder: one forward pass for prefill, drafting and verification, through any cache view.

A view describes the pass and names the KV memory; the model runs it. Nothing here depends on the tier.

Shape suffixes: B rows, T tokens fed, J scored columns, V vocabulary, S layers whose outputs are kept, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor

from triforce.backends import dispatch
from triforce.backends.current_device import device_context, steps_on
from triforce.backends.kernel_api import ForwardBatch, ForwardOutput, KVBackend, OffloadedKVBackend
from triforce.distributed.group import ALONE, TPGroup
from triforce.model.config import ModelConfig
from triforce.model.expert_unions import SAMPLED, ExpertUnions
from triforce.model.weights import Weights
from triforce.ragged import Ints


class View(Protocol):
    """View of a KV memory's rows, as one tier sees them."""

    @property
    def kv(self) -> KVBackend:
        """KV memory that passes of this view write and read."""

    def begin(self, counts_B: Ints, width: int) -> ForwardBatch:
        """Return the pass that feeds `counts_B` tokens of each row at its length; columns up to `width` are padding."""

    def record(self, batch: ForwardBatch, output: ForwardOutput | None = None) -> None:
        """Count the tokens of a pass from `begin` as cached, and keep what `output` observed (None: nothing)."""


class ReadableHead(Protocol):
    """Model that unpacks rows of its output head."""

    def head_rows(self, ids_N: Tensor) -> Tensor: ...


class Decoder:
    """Model without its cache: weights of one dtype on one device, never trained.

    `bits`: 8 or 4 rounds the weights to that, only for tiers whose tokens are verified; 0 keeps them. Raises
    RequestError where the kernels cannot round. `ranks` share the model: config and weights are then this rank's.
    """

    def __init__(self, config: ModelConfig, weights: Weights, bits: int = 0, ranks: TPGroup = ALONE) -> None:
        self.config = config
        self.ranks = ranks
        self.device = weights.norm_C.device
        self.dtype = weights.embedding_VC.dtype
        self.model = dispatch.model(config, weights, bits, ranks)
        self._on_device: Callable[[], AbstractContextManager[object]] = nullcontext
        if self.device.type == "cuda":
            self._on_device = partial(device_context, self.device)
        experts = config.architecture.experts
        self.unions = ExpertUnions(experts) if experts else None
        """Unions of experts, observed from this model's passes; None without experts."""

    # Not inference_mode: a caller may keep outputs of a pass and change them in place outside of it.
    @torch.no_grad()
    def __call__(self, ids_BT: Tensor, counts_B: Ints, cache: View, at_BJ: Tensor | None = None) -> Tensor:
        """Run one pass: feed the first `counts_B` tokens of each row, which then are in the cache.

        The other columns are padding. Ids and columns are on the host. Returns the logits of the columns `at_BJ`
        (None: all columns, J = T; J = 0 scores nothing), float32 (B, J, V).
        """
        return self.observe(ids_BT, counts_B, cache, at_BJ, ())[1].logits_BJV

    @torch.no_grad()
    def observe(
        self, ids_BT: Tensor, counts_B: Ints, cache: View, at_BJ: Tensor | None, layers: tuple[int, ...]
    ) -> tuple[ForwardBatch, ForwardOutput]:
        """Run the same pass; return the batch that the view described, and the whole output.

        The output has the residual stream after the first n layers, for each n of `layers`, too.
        """
        batch = cache.begin(counts_B, ids_BT.shape[1])
        if layers:
            batch = replace(batch, states=layers)
        with self._on_device():
            output = self.model.forward(ids_BT, cache.kv, batch, at_BJ)
        cache.record(batch, output)
        if self.unions:
            self._observe_experts(ids_BT, counts_B, output)
        return batch, output

    @torch.no_grad()
    def run(self, ids_BT: Tensor, kv: KVBackend, batch: ForwardBatch, at_BJ: Tensor | None) -> ForwardOutput:
        """Run a pass that a view has described, without recording it in the view."""
        with self._on_device():
            return self.model.forward(ids_BT, kv, batch, at_BJ)

    @torch.no_grad()
    def head_rows(self, ids_N: Tensor) -> Tensor:
        """Return the head's rows of tokens `ids_N`, as products use them: float32 (N, C)."""
        with device_context(self.device):
            return cast(ReadableHead, self.model).head_rows(ids_N)

    @torch.no_grad()
    def read(self, ids_1T: Tensor, counts_1: Ints, cache: View) -> Iterator[int]:
        """Feed many tokens of one row, unscored, in a pass that may be abandoned between two parts.

        Yields after each part the tokens that all work so far is worth.
        """
        yield from self.observe_parts(ids_1T, counts_1, cache, ())

    @torch.no_grad()
    def observe_parts(
        self, ids_1T: Tensor, counts_1: Ints, cache: View, layers: tuple[int, ...]
    ) -> Generator[int, None, tuple[ForwardBatch, ForwardOutput]]:
        """Run the pass of `read`; return what `observe` does, without logits."""
        with device_context(self.device):
            batch = replace(cache.begin(counts_1, ids_1T.shape[1]), states=layers)
        output = yield from dispatch.parts_of_pass(self.model, cache.kv, ids_1T, batch)
        cache.record(batch, output)
        if self.unions:
            self._observe_experts(ids_1T, counts_1, output)
        return batch, output

    def _observe_experts(self, ids_BT: Tensor, counts_B: Ints, output: ForwardOutput) -> None:
        """Observe how many distinct experts the first tokens of a pass touch."""
        width = min(SAMPLED, ids_BT.numel())
        if self.unions and output.touched and counts_B[0] >= width:  # of one sequence, without padding
            self.unions.observe(width, output.touched)

    @torch.no_grad()
    def read_by_layer(self, ids_1T: Tensor, counts_1: Ints, cache: View) -> Iterator[int]:
        """Feed many tokens of one row whose KV is offloaded, unscored, layer by layer: K and V leave memory once.

        Yields after each step the tokens that all work so far is worth. Raises CacheError.
        """
        batch = cache.begin(counts_1, ids_1T.shape[1])
        steps = cast(OffloadedKVBackend, cache.kv).read_prompt(self.model, ids_1T, batch)
        yield from steps_on(self.device, steps)
        cache.record(batch)

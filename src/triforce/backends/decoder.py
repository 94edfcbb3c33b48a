"""The Llama-family decoder: one forward pass for prefill, drafting and verification, through any cache view.

A view describes the pass and names the KV memory; the model runs it. Nothing here depends on the tier.

Shape suffixes: B rows, T tokens fed, J scored columns, V vocabulary, S layers whose outputs are kept, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Protocol, cast

from triforce.arrays import Array, is_gpu
from triforce.backends import dispatch
from triforce.backends.current_device import device_context, steps_on
from triforce.backends.kernel_api import ForwardBatch, ForwardOutput, KVBackend, OffloadedKVBackend
from triforce.distributed.group import ALONE, TPGroup
from triforce.model.config import ModelConfig
from triforce.model.expert_unions import SAMPLED_TOKENS, ExpertUnions
from triforce.model.weights import Weights
from triforce.ragged import Ints


class View(Protocol):
    """View of a KV memory's rows, as one tier sees them."""

    @property
    def kv(self) -> KVBackend:
        """KV memory that passes of this view write and read."""

    def begin(self, counts_B: Ints, width: int) -> ForwardBatch:
        """Return a pass that appends `counts_B[b]` tokens to row b. The other columns, up to `width`, are padding."""

    def record(self, batch: ForwardBatch, output: ForwardOutput | None = None) -> None:
        """Count the tokens of a pass from `begin` as cached, and keep what `output` observed (None: nothing)."""


class ReadableHead(Protocol):
    """Model that unpacks rows of its output head."""

    def head_rows(self, ids_N: Ints) -> Array: ...


class Decoder:
    """Model without its cache: weights of one dtype on one device, never trained.

    `weights`: on the host. `device`: where passes run, such as `cuda:0`. `bits`: 8 or 4 rounds the weights to 8 or 4
    bits, for tiers whose tokens the target verifies; 0: no rounding. Raises RequestError where the kernels cannot
    round. `ranks`: the group that shares the model; config and weights are then those of this rank.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, device: str = "cpu", bits: int = 0, ranks: TPGroup = ALONE
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.device = device
        self.dtype = weights.dtype
        self.model = dispatch.model(config, weights, device, bits, ranks)
        self._on_device: Callable[[], AbstractContextManager[object]] = nullcontext
        if is_gpu(self.device):
            self._on_device = partial(device_context, self.device)
        experts = config.architecture.experts
        self.unions = ExpertUnions(experts) if experts else None
        """Unions of experts, observed from this model's passes; None without experts."""

    def __call__(self, ids_BT: Ints, counts_B: Ints, cache: View, at_BJ: Ints | None = None) -> Array:
        """Run one pass: feed the first `counts_B` tokens of each row, which then are in the cache.

        The other columns are padding. Returns the logits of the columns `at_BJ` (None: all columns, J = T; J = 0 scores
        nothing), float32 (B, J, V).
        """
        return self.observe(ids_BT, counts_B, cache, at_BJ, ())[1].logits_BJV

    def observe(
        self, ids_BT: Ints, counts_B: Ints, cache: View, at_BJ: Ints | None, layers: tuple[int, ...]
    ) -> tuple[ForwardBatch, ForwardOutput]:
        """Run a pass as `__call__` does; return the batch that the view described, and the whole output.

        The output also has the residual stream after the first n layers, for each n of `layers`.
        """
        batch = cache.begin(counts_B, ids_BT.shape[1])
        if layers:
            batch = replace(batch, state_layers=layers)
        with self._on_device():
            output = self.model.forward(ids_BT, cache.kv, batch, at_BJ)
        cache.record(batch, output)
        if self.unions:
            self._observe_experts(ids_BT, counts_B, output)
        return batch, output

    def with_int8_inputs(self) -> Decoder:
        """Return a decoder on the same weights with `ModelConfig.int8_inputs`, or this one if it gains nothing."""
        model = dispatch.with_int8_inputs(self.model)
        if model is self.model:
            return self
        twin = copy(self)
        twin.model = model
        twin.config = replace(self.config, int8_inputs=True)
        return twin

    def run(self, ids_BT: Ints, kv: KVBackend, batch: ForwardBatch, at_BJ: Ints | None) -> ForwardOutput:
        """Run a pass that a view has described, without recording it in the view."""
        with self._on_device():
            return self.model.forward(ids_BT, kv, batch, at_BJ)

    def head_rows(self, ids_N: Ints) -> Array:
        """Return the head's rows of tokens `ids_N`, as products use them: float32 (N, C)."""
        with device_context(self.device):
            return cast(ReadableHead, self.model).head_rows(ids_N)

    def read(self, ids_1T: Ints, counts_1: Ints, cache: View) -> Iterator[int]:
        """Feed many tokens of one row, unscored, in a pass that may be abandoned between two parts.

        Yields the progress after each part, in tokens: the share of the pass that is done times the tokens of the pass.
        """
        yield from self.observe_parts(ids_1T, counts_1, cache, ())

    def observe_parts(
        self, ids_1T: Ints, counts_1: Ints, cache: View, layers: tuple[int, ...]
    ) -> Generator[int, None, tuple[ForwardBatch, ForwardOutput]]:
        """Run the pass of `read`; return the batch and the output as `observe` does, without logits."""
        with device_context(self.device):
            batch = replace(cache.begin(counts_1, ids_1T.shape[1]), state_layers=layers)
        output = yield from dispatch.parts_of_pass(self.model, cache.kv, ids_1T, batch)
        cache.record(batch, output)
        if self.unions:
            self._observe_experts(ids_1T, counts_1, output)
        return batch, output

    def _observe_experts(self, ids_BT: Ints, counts_B: Ints, output: ForwardOutput) -> None:
        """Observe how many distinct experts the first tokens of a pass touch."""
        width = min(SAMPLED_TOKENS, ids_BT.size)
        # The first `width` tokens must be of one sequence, without padding.
        if self.unions and output.mean_distinct_experts and counts_B[0] >= width:
            self.unions.observe(width, output.mean_distinct_experts)

    def read_by_layer(self, ids_1T: Ints, counts_1: Ints, cache: View) -> Iterator[int]:
        """Feed many tokens of one row whose KV is offloaded, unscored, layer by layer.

        The KV of each layer is written to the store once. Yields the progress after each step, as `read` does. Raises
        CacheError.
        """
        batch = cache.begin(counts_1, ids_1T.shape[1])
        steps = cast(OffloadedKVBackend, cache.kv).read_prompt(self.model, ids_1T, batch)
        yield from steps_on(self.device, steps)
        cache.record(batch)

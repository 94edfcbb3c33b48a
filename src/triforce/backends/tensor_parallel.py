"""A model that several ranks share, each with a part of it. What lies between the parts is gathered.

Exact ranks sum each output up over all of its inputs, as one process does: rank r has some rows of every matrix, those
of each expert too, and what a matrix reads is gathered before it. Ranks that are not have some columns of o_proj and
down_proj instead, as Megatron-LM has it (Shoeybi et al. 2019), and add their parts of each sum: fewer words, but sums
in another order.

Shape suffixes as in kernel_api.py; R ranks, Q = H * D of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from triforce.backends.kernel_api import Forward, ForwardBatch, ForwardOutput, KVBackend, LayerShard, ModelShard
from triforce.distributed.group import TPGroup, span, spans
from triforce.model.config import ModelConfig


class ShardedModel:
    """`config` has this rank's heads; `forward` runs its layers, with the kernels that the part is for."""

    def __init__(
        self, config: ModelConfig, part: ModelShard, ranks: TPGroup, dtype: torch.dtype, forward: Forward
    ) -> None:
        self.config = config
        self._part = part
        self._ranks = ranks
        self._forward = forward
        self.blocks = [ShardedLayer(layer, ranks, dtype) for layer in part.blocks]
        self.width_independent = part.width_independent and ranks.exact
        self._ends = [*accumulate(spans(config.vocab_size, ranks.count))][:-1]

    def forward(self, ids_BT: Tensor, kv: KVBackend, batch: ForwardBatch, at_BJ: Tensor | None) -> ForwardOutput:
        return self._forward(self, ids_BT, kv, batch, at_BJ)

    def embed(self, ids_N: Tensor) -> Tensor:
        return self._rows(self._part.embed, ids_N)

    def head_rows(self, ids_N: Tensor) -> Tensor:
        """Return the rows of these tokens in the head: float32 (N, C)."""
        return self._rows(self._part.head_rows, ids_N)

    def _rows(self, lookup: Callable[[Tensor], Tensor], ids_N: Tensor) -> Tensor:
        """Return (N, C) of all ranks' tokens. Each brings rows of its own, and of others whatever it has."""
        N = len(ids_N)
        C = self.config.hidden_size
        V = self.config.vocab_size
        rank_span = span(V, self._ranks)
        rank_NC = lookup(ids_N.clamp(rank_span.start, rank_span.stop - 1) - rank_span.start)
        x_NRC = self._ranks.gather(rank_NC, self._ranks.count * C).view(N, -1, C)
        # Numbers, not a tensor: a graph cannot take that to the device.
        owners_N = sum((ids_N >= end for end in self._ends), torch.zeros_like(ids_N))
        return x_NRC[torch.arange(N, device=ids_N.device), owners_N]

    def head(self, x_NC: Tensor) -> Tensor:
        if not len(x_NC):
            return x_NC.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        return self._ranks.gather(self._part.head(x_NC), self.config.vocab_size)


class ShardedLayer:
    def __init__(self, part: LayerShard, ranks: TPGroup, dtype: torch.dtype) -> None:
        self._part = part
        self._ranks = ranks
        self._dtype = dtype

    def qkv(self, x_NC: Tensor) -> tuple[Tensor, ...]:
        return self._part.qkv(x_NC, self._ranks)

    def finish(self, x_NC: Tensor, attn_out_NQ: Tensor) -> int:
        """`attn_out` is of this rank's heads, and so are q, k and v above; x is whole on every rank."""
        return self._part.finish(x_NC, attn_out_NQ.to(self._dtype), self._ranks)

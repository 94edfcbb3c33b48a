"""Tensor parallelism: a model that several ranks share. Each has a shard; activations between shards are gathered.

Exact ranks sum each output over all of its inputs, as one process does: rank r has some rows of every matrix, of each
expert's too, and the inputs of a matrix are gathered before it. Other ranks have some columns of o_proj and down_proj
instead, as in Megatron-LM (Shoeybi et al. 2019), and add their parts of each sum: less communication, but sums in
another order.

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
    """Model of one rank. `config` has this rank's heads; `forward` runs the layers with the kernels of `part`."""

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
        """Return the head's rows of tokens `ids_N`: float32 (N, C)."""
        return self._rows(self._part.head_rows, ids_N)

    def _rows(self, lookup: Callable[[Tensor], Tensor], ids_N: Tensor) -> Tensor:
        """Return rows (N, C) of any tokens. Each rank looks up its own tokens' rows; its other rows are ignored."""
        N = len(ids_N)
        C = self.config.hidden_size
        V = self.config.vocab_size
        rank_span = span(V, self._ranks)
        rank_NC = lookup(ids_N.clamp(rank_span.start, rank_span.stop - 1) - rank_span.start)
        x_NRC = self._ranks.gather(rank_NC, self._ranks.count * C).view(N, -1, C)
        # Python numbers, not a tensor: a captured graph cannot copy a tensor to the device.
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
        """Finish a layer from `attn_out` of this rank's heads, as q, k and v are; x is whole on every rank."""
        return self._part.finish(x_NC, attn_out_NQ.to(self._dtype), self._ranks)

"""Tensor parallelism: a model that several ranks share. Each has a shard; activations between shards are gathered.

Exact ranks sum each output over all of its inputs, in the order of one process. Each rank has some rows of every
matrix, including the experts' matrices. The inputs of a matrix are gathered before its product.

Ranks with --tp-all-reduce have some columns of o_proj and down_proj instead, as in Megatron-LM (Shoeybi et al. 2019),
and add up their partial sums. They communicate less, but sum in another order.

Shape suffixes as in kernel_api.py; R ranks, Q = H * D of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from triforce.arrays import Array, DType, cast, namespace, on_device_of
from triforce.backends.kernel_api import Forward, ForwardBatch, ForwardOutput, KVBackend, LayerShard, ModelShard
from triforce.distributed.group import TPGroup, span, spans
from triforce.model.config import ModelConfig
from triforce.ragged import Ints


class ShardedModel:
    """Model of one rank. `config` has this rank's heads; `forward` runs the layers with the kernels of `part`."""

    def __init__(self, config: ModelConfig, part: ModelShard, ranks: TPGroup, dtype: DType, forward: Forward) -> None:
        self.config = config
        self._part = part
        self._ranks = ranks
        self._forward = forward
        self.blocks = [ShardedLayer(layer, ranks, dtype) for layer in part.blocks]
        self.width_independent = part.width_independent and ranks.exact
        self._ends = [*accumulate(spans(config.vocab_size, ranks.count))][:-1]

    def forward(self, ids_BT: Ints, kv: KVBackend, batch: ForwardBatch, at_BJ: Ints | None) -> ForwardOutput:
        return self._forward(self, ids_BT, kv, batch, at_BJ)

    def embed(self, ids_N: Array) -> Array:
        return self._rows(self._part.embed, ids_N)

    def head_rows(self, ids_N: Array) -> Array:
        """Return the head's rows of tokens `ids_N`: float32 (N, C)."""
        return self._rows(self._part.head_rows, ids_N)

    def _rows(self, lookup: Callable[[Array], Array], ids_N: Array) -> Array:
        """Return rows (N, C) of any tokens. A rank looks up the rows of its own tokens; its other rows are ignored."""
        N = len(ids_N)
        C = self.config.hidden_size
        V = self.config.vocab_size
        rank_span = span(V, self._ranks)
        xp = namespace(ids_N)
        rank_NC = lookup(xp.clip(ids_N, rank_span.start, rank_span.stop - 1) - rank_span.start)
        x_NRC = self._ranks.gather(rank_NC, self._ranks.count * C).reshape(N, -1, C)
        # Python numbers, not a tensor: a captured graph cannot copy a tensor to the device.
        owners_N = on_device_of(sum((ids_N >= end for end in self._ends), xp.zeros_like(ids_N)), x_NRC)
        return x_NRC[namespace(x_NRC).arange(N, device=x_NRC.device), owners_N]

    def head(self, x_NC: Array) -> Array:
        if not len(x_NC):
            xp = namespace(x_NC)
            return xp.empty((0, self.config.vocab_size), dtype=xp.float32, device=x_NC.device)
        return self._ranks.gather(self._part.head(x_NC), self.config.vocab_size)


class ShardedLayer:
    def __init__(self, part: LayerShard, ranks: TPGroup, dtype: DType) -> None:
        self._part = part
        self._ranks = ranks
        self._dtype = dtype

    def qkv(self, x_NC: Array) -> tuple[Array, ...]:
        return self._part.qkv(x_NC, self._ranks)

    def finish(self, x_NC: Array, attn_out_NQ: Array) -> int:
        """Finish a layer. `attn_out` is that of this rank's heads; every rank has the complete x."""
        return self._part.finish(x_NC, cast(attn_out_NQ, self._dtype), self._ranks)

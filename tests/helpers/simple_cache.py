"""The simplest KV cache: dense, causal, rows of equal length. Tests of the decoder use it as the slow path."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.arrays import Array, to_host
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import ForwardBatch, LayerAttention
from triforce.backends.torch.rotation import RopeTensors, rotate
from triforce.backends.torch.tensors import as_tensor
from triforce.model.config import ModelConfig
from triforce.ragged import Ints, columns

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class SimpleCache:
    """Implements the View protocol for a batch whose rows always advance together."""

    def __init__(self, config: ModelConfig, rows: int = 1, device: str = "cpu") -> None:
        self.config = config
        self.rope = RopeTensors(config.rope, device)
        self.lengths_B = np.zeros(rows, dtype=np.int64)
        self.keys: list[list[Tensor]] = [[] for _ in range(config.layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(config.layers)]

    @property
    def kv(self) -> SimpleCache:
        return self

    def begin(self, counts_B: Ints, width: int) -> ForwardBatch:
        assert (counts_B == width).all(), "rows of equal length only"
        self.rewind(self.lengths_B)
        self._width = width
        return ForwardBatch(self.lengths_B.tolist(), [])

    def record(self, batch: ForwardBatch, output: object = None) -> None:
        self.lengths_B = self.lengths_B + self._width

    def layer_attention(self, batch: ForwardBatch, width: int) -> LayerAttention:
        def attention(layer: int, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
            mixed = self.attend(layer, *map(as_tensor, (q, k, v)))
            return q, to_host(mixed) if isinstance(q, np.ndarray) else mixed, q

        return attention

    def attend(self, layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
        T = q_BTHD.shape[1]
        positions_BT = torch.from_numpy(columns(self.lengths_B, T)).to(q_BTHD.device)
        kind = self.config.architecture.kind(layer)
        cos_sin = self.rope.cos_sin(positions_BT, kind.rope)
        self.keys[layer].append(rotate(k_BTGD, cos_sin))
        self.values[layer].append(v_BTGD)
        keys_values = (self.keys[layer], self.values[layer])
        q, k, v = (torch.cat(x, 1).transpose(1, 2) for x in ([rotate(q_BTHD, cos_sin)], *keys_values))
        key_S, query_T1 = torch.arange(k.shape[2], device=k.device), positions_BT[0, :, None]
        seen_TS = (key_S <= query_T1) & (key_S > query_T1 - (kind.window or k.shape[2]))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen_TS, enable_gqa=True).transpose(1, 2)

    def rewind(self, lengths_B: Ints) -> None:
        self.lengths_B = np.minimum(self.lengths_B, lengths_B)
        S = int(self.lengths_B[0])
        for stored in (*self.keys, *self.values):
            stored[:] = [torch.cat(stored, 1)[:, :S]] if stored else []


def score(decoder: Decoder, ids_BT: Array, cache: SimpleCache | None = None, at_BJ: Array | None = None) -> Tensor:
    """Return logits, on the CPU, of one pass over tokens that the cache has not seen."""
    B, T = ids_BT.shape
    cache = cache or SimpleCache(decoder.config, B, decoder.device)
    at_BJ = None if at_BJ is None else to_host(at_BJ)
    return as_tensor(decoder(to_host(ids_BT), np.full(B, T), cache, at_BJ)).cpu()

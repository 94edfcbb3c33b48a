"""A random decoder small enough for thousands of passes, and dense caches as oracles of the paged ones.

The dense caches share no code with `triforce.kvcache` but the rotation's table of cos and sin. They hold one row, keep
all that they are fed, and compute in float64. Shape suffixes as in docs/design/request.md; N keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tests.helpers.simple_cache import DEVICE
from triforce.arrays import Array, DType, to_host
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import ForwardBatch, LayerAttention
from triforce.backends.torch.rotation import RopeTensors
from triforce.backends.torch.tensor_weights import mapped_weights
from triforce.backends.torch.tensors import as_tensor, torch_dtype
from triforce.checkpoint.rope_scaling import wavelengths
from triforce.kvcache import PAGE, FullView, PagePool, RetrievalView
from triforce.model.config import ModelConfig
from triforce.model.rope import Rope
from triforce.model.weights import Layer, Weights
from triforce.ragged import Ints, ints

DTYPE = "float64" if DEVICE == "cpu" else "float32"  # CUDA's fused attention has no float64
CLOSE = dict(atol=5e-5, rtol=5e-5)  # the rotation, the norms and the softmax are float32 whatever the dtype
VOCAB = 61


def small_decoder(
    seed: int = 0, layers: int = 2, heads: int = 4, kv_heads: int = 2, context: int = 4096, dtype: DType = DTYPE
) -> Decoder:
    """Return a decoder with random weights that keep attention far from uniform, so that a wrong key shows."""
    D, C, I = 8, 32, 48  # noqa: E741
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int, gain: float = 1.0) -> Tensor:
        weight = torch.randn(*shape, generator=draw, dtype=torch.float64) * gain * shape[-1] ** -0.5
        return weight.to(torch_dtype(dtype))

    def norm() -> Tensor:
        return (1 + 0.2 * torch.randn(C, generator=draw, dtype=torch.float64)).to(torch_dtype(dtype))

    rope = Rope(1 / wavelengths(100.0, D), 1.0)
    config = ModelConfig(VOCAB, C, I, layers, heads, kv_heads, D, 1e-5, False, context, rope)
    blocks = tuple(
        Layer(
            norm(), random(heads * D, C, gain=1.6), random(kv_heads * D, C, gain=1.6), random(kv_heads * D, C),
            random(C, heads * D), norm(), random(I, C), random(I, C), random(C, I),
        )
        for _ in range(layers)
    )  # fmt: skip
    weights = Weights(random(VOCAB, C, gain=C**0.5), blocks, norm(), random(VOCAB, C, gain=2.0))
    return Decoder(config, mapped_weights(weights, to_host), DEVICE)


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def longs(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.long, device=DEVICE)


def feed(decoder: Decoder, view: object, rows: Sequence[Sequence[int]], padding: int = 0) -> list[Tensor]:
    """Run one ragged pass, with `padding` columns more than needed; return logits (count, V) of each row."""
    counts = [len(row) for row in rows]
    width = max(counts) + padding
    ids_BT = np.array([[*row, *text(width - len(row), seed=99)] for row in rows])
    logits_BTV = as_tensor(decoder(ids_BT, ints(counts), view))
    return [logits_BTV[b, :count] for b, count in enumerate(counts)]


def prefill(decoder: Decoder, view: object, b: int, ids: Sequence[int]) -> None:
    """Prefill row b up to `ids`, in the steps that the view asks for."""
    row = view.row(b)
    while True:
        start, stop = row.resume(len(ids))
        if start >= stop:
            return
        feed(decoder, row, [ids[start:stop]])


def make_pool(decoder: Decoder, rows: int, capacity: int, spare: int = 0, fragmented: bool = False) -> PagePool:
    """Return a pool full of NaN, with room for `capacity` tokens per row, in scattered pages if `fragmented`."""
    pages = -(-capacity // PAGE)
    pool = PagePool(decoder.config, rows, rows * pages + spare, decoder.dtype, decoder.device, unit=1)
    poison(pool, np.arange(pool.kv.keys_LGSD.shape[2]))
    for page in range(1 if fragmented else pages, pages + 1):
        for b in range(rows):
            pool.reserve(b, page * PAGE)
    return pool


def poison(pool: PagePool, slots_N: Array) -> None:
    for memory_LGSD in (pool.kv.keys_LGSD, pool.kv.values_LGSD):
        memory_LGSD[:, :, pool.array(slots_N)] = torch.nan


def slots_of(lower: RetrievalView, b: int) -> Tensor:
    """Return the slots (L, G, N) of a row's selection."""
    choice = lower.selections[b].pages
    assert choice is not None
    return (choice.units.long()[..., None] * lower.unit + torch.arange(lower.unit, device=DEVICE)).flatten(2)


def turn(x_THD: Tensor, rope: Rope, positions: Sequence[int]) -> Tensor:
    """Rotate as complex numbers, in float64."""
    cos, sin = (table.double() for table in RopeTensors(rope, x_THD.device).cos_sin(longs(positions)))
    z = torch.complex(*x_THD.double().chunk(2, -1)) * torch.complex(cos, sin)[:, None]
    return torch.cat([z.real, z.imag], -1)


def weigh(q_TD: Tensor, k_ND: Tensor, seen_TN: Tensor) -> Tensor:
    """Return attention weights of one query head, float64."""
    scores_TN = q_TD.double() @ k_ND.double().T / q_TD.shape[-1] ** 0.5
    return scores_TN.masked_fill(~seen_TN, -torch.inf).softmax(-1)


Seen = Callable[[int, int, int], set[int] | None]
"""Maps layer, KV head and position of a query to the earlier positions that it sees; None is all."""


def everything(layer: int, g: int, position: int) -> None:
    return None


class Dense:
    """Dense cache of one row, rotated. `seen` restricts a query's sight; `mass` and `queries` are of the last pass."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.seen: Seen = everything
        self.length = 0
        self.keys = [
            torch.empty(0, config.kv_heads, config.head_dim, dtype=torch.float64, device=DEVICE)
        ] * config.layers
        self.values = list(self.keys)
        self.queries: dict[int, Tensor] = {}
        self.mass: dict[int, Tensor] = {}

    def copy(self) -> Dense:
        copied = Dense(self.config)
        copied.length = self.length
        copied.keys = list(self.keys)
        copied.values = list(self.values)
        return copied

    @property
    def kv(self) -> Dense:
        return self

    def begin(self, counts_B: Ints, width: int) -> ForwardBatch:
        assert counts_B.tolist() == [width]
        self._width = width
        return ForwardBatch([self.length], [])

    def record(self, batch: ForwardBatch, output: object = None) -> None:
        """Advance the length. `mass` and `queries` hold the observations."""
        self.length += self._width

    def layer_attention(self, batch: ForwardBatch, width: int) -> LayerAttention:
        return lambda layer, q, k, v: (q, self.attend(layer, q, k, v), q)

    def attend(self, layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
        positions = range(self.length, self.length + q_BTHD.shape[1])
        q_THD, k_TGD = (turn(x[0], self.config.rope, positions) for x in (q_BTHD, k_BTGD))
        self.keys[layer] = torch.cat([self.keys[layer][: self.length], k_TGD])
        self.values[layer] = torch.cat([self.values[layer][: self.length], v_BTGD[0].double()])
        self.queries[layer] = q_THD
        mixed_THD = torch.empty_like(q_THD)
        group = self.config.heads // self.config.kv_heads
        mass_GN = torch.zeros(self.config.kv_heads, positions.stop, dtype=torch.float64, device=DEVICE)
        for h in range(self.config.heads):
            seen_TN = self._seen(layer, h // group, positions)
            weights_TN = weigh(q_THD[:, h], self.keys[layer][:, h // group], seen_TN)
            mass_GN[h // group] += weights_TN.sum(0)
            mixed_THD[:, h] = weights_TN @ self.values[layer][:, h // group]
        self.mass[layer] = mass_GN
        return mixed_THD[None].to(q_BTHD.dtype)

    def cut(self, length: int) -> None:
        self.length = min(self.length, length)

    def _seen(self, layer: int, g: int, positions: range) -> Tensor:
        seen_TN = torch.arange(positions.stop, device=DEVICE) <= longs(positions)[:, None]
        for t, position in enumerate(positions):
            if (only := self.seen(layer, g, position)) is not None:
                hidden = [n for n in range(positions.stop) if n not in only]
                seen_TN[t, hidden] = False
        return seen_TN


def dense(decoder: Decoder, ids: Sequence[int]) -> Dense:
    """Return a dense cache with a fresh prefill of one text."""
    cache = Dense(decoder.config)
    if ids:
        feed(decoder, cache, [ids])
    return cache


def assert_holds(full: FullView, b: int, expected: Dense) -> None:
    """Check that row b's committed keys and values are those of a fresh prefill."""
    row = full.rows[b]
    assert int(full.lengths_B[b]) == expected.length
    for layer in range(full.pool.config.layers):
        stored = full.pool.span(layer, row, 0, expected.length)
        for got_GND, wanted_NGD in zip(stored, (expected.keys[layer], expected.values[layer]), strict=True):
            torch.testing.assert_close(got_GND.double(), wanted_NGD[: expected.length].transpose(0, 1), **CLOSE)

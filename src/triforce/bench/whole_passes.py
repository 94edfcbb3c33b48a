"""Passes of whole decoders of random weights over random KV, and their work.

Shape suffixes as in backends/kernel_api.py.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from triforce.backends import native_loader
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import ForwardBatch, PageTable, pages_for
from triforce.bench import family_shapes
from triforce.bench.roofline import Work
from triforce.bench.synthetic import fill
from triforce.kvcache import PAGE, FullView, PagePool
from triforce.kvcache.views.windows import windowed
from triforce.model.config import ModelConfig
from triforce.model.expert_unions import SAMPLED
from triforce.model.weights import Matrix, nbytes
from triforce.ragged import Ints, ints


class Model:
    """A decoder of a shape and its int8 copy, if it has one; how many numbers its products read, in how many bytes."""

    def __init__(self, name: str, context: int) -> None:
        config, weights = family_shapes.parts(name, context)
        self.name, self.config, self.decoder = name, config, Decoder(config, weights)
        copies = native_loader.native is not None and weights.has_numbers
        self.lower = Decoder(config, weights, bits=8) if copies else None
        experts = {id(part) for layer in weights.layers for expert in layer.experts for part in expert.weights()}
        self._read = {kind: Size() for kind in ("dense", "experts")}
        for weight in weights.multiplied():
            self._read["experts" if id(weight) in experts else "dense"].add(weight)
        self._products = "bfloat16" if weights.has_numbers else "int16"

    def coded(self, context: int) -> FullView:
        """Return a view of so much KV as int8, which the decoder reads as it reads its own."""
        config = replace(self.config, kv_int8=True)
        return filled(PagePool(config, 1, pages_for(context + 64), self.decoder.dtype), context)

    def union(self, view: FullView, width: int) -> float:
        """Return how many experts a pass of so many tokens reads, in so many times those of one token."""
        experts = self.config.architecture.experts
        if experts is None:
            return 1.0
        _, output = self.decoder.observe(ids(width), ints([width]), view, None, ())
        assert self.decoder.unions, "it has experts"
        return output.touched / experts.chosen if width <= SAMPLED else float(self.decoder.unions.times(width))

    def work(self, width: int, keys: int, config: ModelConfig | None = None, union: float = 1.0) -> Work:
        """Work of a pass of so many tokens, each over so many keys, as this config or the model's own has them."""
        products, attention = self._operations(width, keys)
        config = config or self.config
        computed = "int16" if config.kv_int8 else "bfloat16"
        operations = Counter({self._products: products}) + Counter({computed: attention})
        weights = self._read["dense"].bytes + union * self._chosen * self._read["experts"].bytes
        return Work(round(weights + config.kv_bytes(2) * self._seen(keys)), operations)

    def int8_work(self, width: int, keys: int) -> Work:
        numbers = self._read["dense"].numbers + self._chosen * self._read["experts"].numbers
        read = round(numbers + self.config.kv_size * self._seen(keys))
        return Work(read, {"int8": sum(self._operations(width, keys))})

    @property
    def _chosen(self) -> float:
        """The part of all experts that one token reads."""
        experts = self.config.architecture.experts
        return experts.chosen / experts.count if experts else 0.0

    def _seen(self, keys: int) -> float:
        """Return how many of so many keys a token sees, in the mean of the layers."""
        return sum(min(window or keys, keys) for window in self.config.windows) / self.config.layers

    def _operations(self, width: int, keys: int) -> tuple[int, int]:
        """Operations of products with weights, and of attention."""
        queries = self.config.layers * self.config.heads * self.config.head_dim
        numbers = self._read["dense"].numbers + self._chosen * self._read["experts"].numbers
        return round(2 * width * numbers), round(4 * width * self._seen(keys) * queries)


@dataclass
class Size:
    """Numbers of matrices, and their bytes."""

    numbers: int = 0
    bytes: int = 0

    def add(self, weight: Matrix) -> None:
        """Count one more."""
        self.numbers += math.prod(weight.shape)
        self.bytes += nbytes(weight)


def filled(pool: PagePool, context: int) -> FullView:
    """Return a view of random KV of so many tokens, and room for the next."""
    pool.reserve(0, context + 64)
    full = FullView(pool)
    full.observe(0)
    fill(pool, context)
    return full


class SparseView(FullView):
    """A view of `budget` tokens, in pages spread over the context, another list for each KV head."""

    def __init__(self, pool: PagePool, budget: int, int8: bool = False) -> None:
        super().__init__(pool, grain=0)
        self._int8 = int8
        length, pages = int(pool.lengths_B[0]), budget // PAGE - 1
        dice = torch.Generator().manual_seed(0)
        picks_GP = torch.stack([torch.randperm(length // PAGE, generator=dice) for _ in range(pool.config.kv_heads)])
        units_BGU = torch.cat([picks_GP[:, :pages].sort(1).values, picks_GP[:, -1:]], 1)[None].int() + 1
        self._units = units_BGU.to(pool.device)

    def begin(self, counts_B: Ints, width: int) -> ForwardBatch:
        starts, counts = [self._units.shape[2] * PAGE - width], counts_B.tolist()
        lists = PageTable(self._units, starts, counts, coarse=starts if self._int8 else [])
        length = int(self.lengths_B[0])
        see = windowed(self.pool, PageTable(self.pool.units(range(1), PAGE), [length], counts), range(1))
        grouped = [(window, len([*group])) for window, group in groupby(self.pool.config.windows)]
        return ForwardBatch([length], [(count, see(window) if window else lists) for window, count in grouped])


def one_pass(decoder: Decoder, view: FullView, width: int) -> None:
    """Compute one pass of a row of `width` tokens."""
    # Not advanced: the next pass writes the same slots.
    decoder(ids(width), ints([width]), view)


def ids(width: int) -> Tensor:
    """Tokens of a pass (1, T), no two alike: a mixture of experts reads the same ones for the same token."""
    return torch.arange(1, width + 1)[None]

"""Passes of whole decoders of random weights over random KV, and their work.

Shape suffixes as in backends/kernel_api.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from triforce.backends import native_loader
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import ForwardBatch, PageTable, pages_for
from triforce.bench import family_shapes
from triforce.bench.model_work import ModelWork
from triforce.bench.synthetic import fill
from triforce.kvcache import PAGE, FullView, PagePool
from triforce.kvcache.views.windows import windowed
from triforce.model.expert_unions import SAMPLED
from triforce.ragged import Ints, ints


class Model:
    """A decoder of a shape and its int8 copy, if it has one, and the work of their passes."""

    def __init__(self, name: str, context: int) -> None:
        config, weights = family_shapes.parts(name, context)
        self.name, self.config, self.decoder = name, config, Decoder(config, weights)
        copies = native_loader.native is not None and weights.has_numbers
        self.lower = Decoder(config, weights, bits=8) if copies else None
        self.work, self.coded_work = (ModelWork(replace(config, kv_int8=int8), weights) for int8 in (False, True))

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
        return output.touched / experts.read if width <= SAMPLED else float(self.decoder.unions.times(width))


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

"""Time of one pass of each tier against the bytes it moves, and of a prefill against its operations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.on_gpu.piece import Names, Piece, Row, Setup
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import pages_for
from triforce.bench.kernels import SparseView, one_pass
from triforce.bench.synthetic import fill
from triforce.engine.speculative_config import SpeculativeConfig
from triforce.engine.tier_builder import SharedKV
from triforce.errors import RequestError
from triforce.kvcache import FullView, OffloadConfig, PagePool, RetrievalConfig
from triforce.kvcache.retrieval_config import Budget
from triforce.ragged import ints

BUDGET = 4096


def pieces(setup: Setup, names: Names, context: int) -> Iterator[Piece]:
    """Full passes of width 1 and 8, a retrieval pass, a pass of the draft, a prefill."""
    shape, draft = names
    for what, of, seen, width in (
        ("full pass", shape, context, 1), ("full pass, width 8", shape, context, 8),
        ("retrieval pass", shape, min(BUDGET, context // 2), 1), ("draft pass", draft, min(512, context // 2), 1),
    ):  # fmt: skip
        yield Piece(what, of, context, partial(_pass, setup, names, of == draft, context, seen, width))
    yield Piece("prefill", shape, context, partial(_prefill, setup, names, context))


def hosted(setup: Setup, names: Names, context: int) -> Iterator[Piece]:
    """Full passes of width 1 and 8 with KV on the host."""
    for width in (1, 8):
        run = partial(_hosted_pass, setup, names, context, width)
        yield Piece(f"full pass, width {width}, offloaded", names[0], context, run)


def _pass(setup: Setup, names: Names, of_draft: bool, context: int, seen: int, width: int) -> Row:
    """The time of one pass, and of the bytes of its weights and keys at the measured bandwidth."""
    models = setup.models(names, context)
    decoder = models.draft if of_draft else models.target
    assert decoder is not None
    pool = _pool(decoder, seen if of_draft else context)
    fill(pool, (seen if of_draft else context) - 16)
    view = FullView(pool, grain=0) if of_draft or seen == context else SparseView(pool, seen)
    took = setup.seconds(partial(one_pass, decoder, view, width), 10)
    moved = decoder.dtype.itemsize * (decoder.config.weights_read + decoder.config.kv_size * seen)
    return {"seconds": took, "bytes": moved, "fraction_of_limit": moved / setup.bandwidth / took, "speedup": None}


def _prefill(setup: Setup, names: Names, context: int) -> Row:
    """A prompt read from nothing: products of weights, and attention of half of all pairs."""
    decoder = setup.models(names, context).target
    c = decoder.config
    ids = torch.randint(1000 % c.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    took = setup.seconds(partial(_read, decoder, _pool(decoder, context), ids), 1)
    operations = 2 * context * (c.weights_read - c.vocab_size * c.hidden_size)
    operations += 2 * c.layers * c.heads * c.head_dim * context**2
    limit = operations / setup.matrix_rate
    return {"seconds": took, "operations": operations, "fraction_of_limit": limit / took, "speedup": None}


def _read(decoder: Decoder, pool: PagePool, ids_1S: torch.Tensor) -> None:
    pool.lengths_B[0] = 0
    full = FullView(pool, grain=0)
    while True:
        start, stop = full.resume(ids_1S.shape[1])
        if start >= stop:
            return
        decoder(ids_1S[:, start:stop], ints([stop - start]), full, torch.zeros(1, 0, dtype=torch.long))
        full.advance(ints([stop - start]))


def _hosted_pass(setup: Setup, names: Names, context: int, width: int) -> Row:
    """The time of one pass, and of the bytes that it brings at the measured rate of the bus."""
    bus, models = setup.bus, setup.models(names, context)
    pool = SharedKV(models, offloading(setup, context), 1, pages_for(context + 64)).pool.more(1)
    memory = require_offloaded(pool)
    pool.reserve(0, context + 64)
    fill(pool, context - 16)
    full, before = FullView(pool, grain=0), memory.bytes_read
    took = setup.seconds(partial(one_pass, models.target, full, width), 3)
    brought = (memory.bytes_read - before) / 4
    return {"seconds": took, "bytes": brought, "bus": bus, "fraction_of_limit": brought / bus / took, "speedup": None}


def offloading(setup: Setup, context: int) -> SpeculativeConfig:
    """Return how to speculate with KV on the host."""
    retrieval = RetrievalConfig(Budget(min(BUDGET, context // 2)))
    return SpeculativeConfig(2, 6, retrieval=retrieval, offload=OffloadConfig.parse("host", setup.kv_memory, "auto"))


def require_offloaded(pool: PagePool) -> Any:
    """Return what counts the bytes that a pool reads from the host. Raises RequestError where it reads none."""
    if pool.offloaded is None:
        raise RequestError("all of this KV fits on the device; give less with --kv-memory, or a longer --contexts")
    return pool.offloaded


def _pool(decoder: Decoder, context: int) -> PagePool:
    pool = PagePool(decoder.config, 1, pages_for(context), decoder.dtype, decoder.device)
    pool.reserve(0, context)
    return pool

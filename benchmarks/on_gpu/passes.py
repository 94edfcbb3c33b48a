"""Time of one pass of each tier against the bytes it moves, and of a prefill against its operations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.on_gpu.piece import Piece, Row, Setup
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import pages_for
from triforce.bench.kernels import SparseView
from triforce.bench.random_kv import fill
from triforce.kvcache import FullView, PagePool
from triforce.ragged import ints

BUDGET = 4096


def pieces(setup: Setup, shape: str, draft: str, context: int) -> Iterator[Piece]:
    """FullView passes of width 1 and 8, a retrieval pass, a pass of the draft, a prefill."""
    for what, of, seen, width in (
        ("full pass", shape, context, 1), ("full pass, width 8", shape, context, 8),
        ("retrieval pass", shape, min(BUDGET, context // 2), 1), ("draft pass", draft, min(512, context // 2), 1),
    ):  # fmt: skip
        yield Piece(what, of, context, "none", partial(_pass, setup, (shape, draft), of == draft, context, seen, width))
    yield Piece("prefill", shape, context, "none", partial(_prefill, setup, (shape, draft), context))


def _pass(setup: Setup, names: tuple[str, str], of_draft: bool, context: int, seen: int, width: int) -> Row:
    """The time of one pass, and of the bytes of its weights and keys at the measured bandwidth."""
    models = setup.models(*names, _positions(context))
    decoder = models.draft if of_draft else models.target
    assert decoder is not None
    full = _filled(decoder, seen if of_draft else context)
    view = full if of_draft or seen == context else SparseView(full.pool, seen)
    took = setup.seconds(partial(once, decoder, view, width), 10)
    size, config = decoder.dtype.itemsize, decoder.config
    moved = size * (config.weights_read + config.kv_size * seen)
    return {"seconds": took, "bytes": moved, "fraction_of_limit": moved / setup.bandwidth / took, "speedup": None}


def _prefill(setup: Setup, names: tuple[str, str], context: int) -> Row:
    """A prompt read from nothing: products of weights, and attention of half of all pairs."""
    decoder = setup.models(*names, _positions(context)).target
    ids = torch.randint(1000 % decoder.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    pool = _pool(decoder, context)
    took = setup.seconds(partial(_read, decoder, pool, ids), 1)
    c = decoder.config
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


def once(decoder: Decoder, view: FullView, width: int) -> None:
    # Not advanced: the next pass writes the same slots.
    decoder(torch.ones(1, width, dtype=torch.long), ints([width]), view)


def _filled(decoder: Decoder, context: int) -> FullView:
    pool = _pool(decoder, context)
    fill(pool, context - 16)
    return FullView(pool, grain=0)


def _pool(decoder: Decoder, context: int) -> PagePool:
    pool = PagePool(decoder.config, 1, pages_for(context), decoder.dtype, decoder.device)
    pool.reserve(0, context)
    return pool


def _positions(context: int) -> int:
    return context + 1024

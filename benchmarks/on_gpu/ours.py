"""Passes of each tier against the bytes they move; TriForce beside plain decoding, in turns, on random weights.

With KV on the device or on the host. The acceptance of what is decoded is drawn at the rates that are named.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.on_gpu.piece import Names, Piece, Row, Setup, speeds
from triforce.arrays import itemsize
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import pages_for
from triforce.bench import shapes
from triforce.bench.kernels import SparseView, one_pass
from triforce.bench.synthetic import SyntheticDecoding, decode, fill, prefilled_batch, verification_figures
from triforce.engine.tier_builder import SharedKV, SpeculativeConfig
from triforce.errors import CacheError, RequestError
from triforce.kvcache import FullView, OffloadConfig, PagePool, RetrievalConfig
from triforce.kvcache.retrieval_config import Budget
from triforce.ragged import Ints, ints

BUDGET = 4096
RATES = {"paper": {"retrieval": 0.977, "draft": 0.35}, "ours": {"retrieval": 0.945, "draft": 0.57}}
"""Acceptance of each tier's draft tokens. The paper's .9234 of the proposed tokens is .977 a token; its inner rate is
the authors'. Ours are the shipped pair's at 16K and temperature 0.6, as measured once (`triforce bench speed`: .832 of
six and .447 of two)."""

TURNS = 3
SPECULATIVE_TOKENS = 6
"""Default number of draft tokens for a verification."""

PLAIN_STEPS = 8
"""Steps of plain decoding that are counted with KV on the host: each takes as long as the KV on the bus."""


def passes(setup: Setup, names: Names, context: int) -> Iterator[Piece]:
    """Full passes of width 1 and 8, a retrieval pass, a pass of the draft, a prefill."""
    shape, draft = names
    for what, of, seen, width in (
        ("full pass", shape, context, 1), ("full pass, width 8", shape, context, 8),
        ("retrieval pass", shape, min(BUDGET, context // 2), 1), ("draft pass", draft, min(512, context // 2), 1),
    ):  # fmt: skip
        yield Piece(what, of, context, partial(_pass, setup, names, of == draft, context, seen, width))
    yield Piece("prefill", shape, context, partial(_prefill, setup, names, context))


def offloaded_passes(setup: Setup, names: Names, context: int) -> Iterator[Piece]:
    """Full passes of width 1 and 8 with KV on the host."""
    for width in (1, 8):
        run = partial(_offloaded_pass, setup, names, context, width)
        yield Piece(f"full pass, width {width}, offloaded", names[0], context, run)


def _pass(setup: Setup, names: Names, of_draft: bool, context: int, seen: int, width: int) -> Row:
    """The time of one pass, as the host waits for it and as the device is busy with it.

    `fraction_of_limit`: of the device's, by the bytes of weights and keys at the measured bandwidth.
    """
    models = setup.models(names, context)
    decoder = models.draft if of_draft else models.target
    assert decoder is not None
    pool = _pool(decoder, seen if of_draft else context)
    fill(pool, (seen if of_draft else context) - 16)
    view = FullView(pool, grain=0) if of_draft or seen == context else SparseView(pool, seen)
    run, clock = partial(one_pass, decoder, view, width), setup.clock
    took, busy = clock.seconds(run, 10), clock.device_seconds(run, 10)
    moved = _bytes(decoder, seen)
    fraction = moved / clock.bandwidth / busy
    return {"seconds": took, "device_seconds": busy, "bytes": moved, "fraction_of_limit": fraction, "speedup": None}


def _bytes(decoder: Decoder, keys: int) -> int:
    """Bytes that a pass over `keys` keys reads: weights and KV."""
    size = itemsize(decoder.dtype)
    return size * decoder.config.weights_read + decoder.config.kv_bytes(size) * keys


def _prefill(setup: Setup, names: Names, context: int) -> Row:
    """A prompt read from nothing: products of weights, and attention of half of all pairs."""
    decoder = setup.models(names, context).target
    c = decoder.config
    ids = np.random.default_rng(0).integers(1000 % c.vocab_size, size=(1, context))
    took = setup.clock.seconds(partial(_read, decoder, _pool(decoder, context), ids), 1)
    operations = 2 * context * (c.weights_read - c.vocab_size * c.hidden_size)
    operations += 2 * c.layers * c.heads * c.head_dim * context**2
    limit = operations / setup.clock.matrix_rate
    return {"seconds": took, "operations": operations, "fraction_of_limit": limit / took, "speedup": None}


def _read(decoder: Decoder, pool: PagePool, ids_1S: Ints) -> None:
    pool.lengths_B[0] = 0
    full = FullView(pool, grain=0)
    while True:
        start, stop = full.resume(ids_1S.shape[1])
        if start >= stop:
            return
        decoder(ids_1S[:, start:stop], ints([stop - start]), full, ids_1S[:, :0])


def _offloaded_pass(setup: Setup, names: Names, context: int, width: int) -> Row:
    """The time of one pass, and of the bytes that it brings at the measured rate of the bus."""
    bus, models = setup.clock.bus, setup.models(names, context)
    pool = SharedKV(models, _offloading(setup, context), 1, pages_for(context + 64)).pool.new_rows(1)
    memory = _require_offloaded(pool)
    pool.reserve(0, context + 64)
    fill(pool, context - 16)
    full, before = FullView(pool, grain=0), memory.bytes_read
    took = setup.clock.seconds(partial(one_pass, models.target, full, width), 3)
    brought = (memory.bytes_read - before) / 4
    return {"seconds": took, "bytes": brought, "bus": bus, "fraction_of_limit": brought / bus / took, "speedup": None}


def _offloading(setup: Setup, context: int, speculative_tokens: int = SPECULATIVE_TOKENS) -> SpeculativeConfig:
    """Return how to speculate with KV on the host."""
    offload = OffloadConfig.parse("host", setup.kv_memory, "auto")
    return SpeculativeConfig(2, speculative_tokens, retrieval=RetrievalConfig(_budget(context)), offload=offload)


def _budget(context: int) -> Budget:
    return Budget(min(BUDGET, context // 2))


def _require_offloaded(pool: PagePool) -> Any:
    """Return what counts the bytes that a pool reads from the host. Raises RequestError where it reads none."""
    if pool.offloaded is None:
        raise RequestError("all of this KV fits on the device; give less with --kv-memory, or a longer --contexts")
    return pool.offloaded


def _pool(decoder: Decoder, context: int) -> PagePool:
    pool = PagePool(decoder.config, 1, pages_for(context), decoder.dtype, decoder.device)
    pool.reserve(0, context)
    return pool


def decodings(setup: Setup, names: Names, context: int, rows: int = 1) -> Iterator[Piece]:
    """One for each pair of rates; plain decoding is measured beside it, in turns."""
    for acceptance in RATES:
        run = partial(_measure, setup, names, context, rows, acceptance)
        yield Piece(f"triforce, {rows} rows, {acceptance} acceptance", names[0], context, run, acceptance)


def offloaded_decodings(
    setup: Setup, names: Names, context: int, speculative_tokens: int = SPECULATIVE_TOKENS
) -> Iterator[Piece]:
    """Decodings with KV on the host and `speculative_tokens` drafted tokens per verification."""
    longer = f", {speculative_tokens} tokens" if speculative_tokens != SPECULATIVE_TOKENS else ""
    for acceptance in RATES:
        run = partial(_measure_offloaded, setup, names, context, acceptance, speculative_tokens)
        yield Piece(f"triforce, {acceptance} acceptance{longer}, offloaded", names[0], context, run, acceptance)


def _measure(setup: Setup, names: Names, context: int, rows: int, acceptance: str) -> Row:
    """Seconds a token of each row; `fraction_of_limit`: of the memory's bandwidth, in plain decoding."""
    _require_room(setup, names[0], context, rows)
    models = setup.models(names, context)
    setting = SpeculativeConfig(2, SPECULATIVE_TOKENS, retrieval=RetrievalConfig(_budget(context)))
    runs: dict[str, list[SyntheticDecoding]] = {"ar": [], "triforce": []}
    for turn in range(TURNS):
        for mode, made in runs.items():
            batch = prefilled_batch(models, mode, setting, context, setup.tokens, rows)
            made.append(decode(batch, RATES[acceptance] if mode == "triforce" else {}, turn, setup.tokens))
            del batch  # its KV, before the next one's
            gc.collect()
    found, least = _speeds(runs, rows), _bytes(models.target, rows * context) / setup.clock.bandwidth
    return found | {"fraction_of_limit": least / found["plain_seconds"]}


def _measure_offloaded(setup: Setup, names: Names, context: int, acceptance: str, speculative_tokens: int) -> Row:
    """Seconds a token, all turns from one store; `fraction_of_limit`: of the bus, while TriForce verifies."""
    bus, models = setup.clock.bus, setup.models(names, context)
    setting, memory, rates = _offloading(setup, context, speculative_tokens), None, list[float]()
    runs: dict[str, list[SyntheticDecoding]] = {"ar": [], "triforce": []}
    for turn in range(TURNS):
        for mode, made in runs.items():
            tokens = setup.tokens if mode == "triforce" else min(setup.tokens, PLAIN_STEPS)
            batch = prefilled_batch(models, mode, setting, context, tokens, reused_view=memory)
            memory = batch.top.cache
            assert isinstance(memory, FullView)
            kv = _require_offloaded(memory.pool)
            before = kv.bytes_read
            made.append(decode(batch, RATES[acceptance] if mode == "triforce" else {}, turn, tokens))
            if mode == "triforce":
                rates.append((kv.bytes_read - before) / batch.stats(0)[-1].seconds)
            del batch
    return _speeds(runs) | {"fraction_of_limit": median(rates) / bus, "bus": bus}


def _speeds(runs: dict[str, list[SyntheticDecoding]], rows: int = 1) -> Row:
    """Seconds a token of each row, and tokens a verification beside those to expect.

    `expected_speedup` is what the speedup would be with as many tokens a verification as are to be expected.
    """
    plain, fast = ([turn.seconds * rows / turn.tokens for turn in turns] for turns in runs.values())
    found, counts = speeds(plain, fast), verification_figures(runs["triforce"])
    luck = counts["tokens_per_verification"] / counts["expected_tokens_per_verification"]
    return found | counts | {"expected_speedup": found["speedup"] / luck}


def _require_room(setup: Setup, shape: str, context: int, rows: int) -> None:
    """Raises CacheError where the device is too small, before a minute was spent on weights."""
    if not setup.on_gpu:
        return
    total = torch.cuda.mem_get_info(setup.device)[1]
    config = shapes.config_of(shape, context, setup.kv_int8)
    needed = 2 * config.parameters + rows * context * config.kv_bytes(2)
    if needed > total:
        raise CacheError(
            f"{rows} rows of {context} tokens of {shape} need {needed / 2**30:.0f} GiB and this device has "
            f"{total / 2**30:.0f}; use a larger one, or --contexts {int(context * total / needed) // 2048 * 1024}"
        )

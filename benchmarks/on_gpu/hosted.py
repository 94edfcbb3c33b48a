"""KV in the host's memory: a pass against the bus, and plain decoding and TriForce in turns, from one store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.on_gpu import decoding, others
from benchmarks.on_gpu.passes import once
from benchmarks.on_gpu.piece import Piece, Row, Setup
from triforce.backends.kernel_api import pages_for
from triforce.bench.random_kv import fill, read
from triforce.engine.speculative_config import SpeculativeConfig
from triforce.engine.tier_builder import ModelSet, SharedKV
from triforce.errors import RequestError
from triforce.kvcache import FullView, OffloadConfig, RetrievalConfig
from triforce.kvcache.retrieval_config import Budget

TOKENS = 32  # of each decoding at most: plainly, each takes as long as the whole KV on the bus


def pieces(setup: Setup, shape: str, draft: str, context: int, cap: int | None = None) -> Iterator[Piece]:
    """FullView passes of width 1 and 8, decoding, and what others do, on a device of so many bytes."""
    setup, label = replace(setup, tokens=min(setup.tokens, TOKENS)), f", {cap >> 30} GiB" if cap else ""
    for width in (1, 8):
        run = partial(_pass, setup, (shape, draft), context, cap, width)
        yield Piece(f"full pass, width {width}, offloaded{label}", shape, context, "none", run)
    for acceptance in decoding.RATES:
        run = partial(_decode, setup, (shape, draft), context, cap, acceptance)
        yield Piece(f"triforce, {acceptance} acceptance, offloaded{label}", shape, context, acceptance, run)
    for piece in others.with_kv_on_the_host(setup, shape, context, label):
        yield replace(piece, run=partial(_under, setup, cap, piece))


@contextmanager
def _capped(setup: Setup, cap: int | None) -> Iterator[None]:
    """As on a device of so many bytes."""
    if cap is None or setup.device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()  # what is kept for later counts
    total = torch.cuda.mem_get_info(setup.device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), setup.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, setup.device)


def _under(setup: Setup, cap: int | None, piece: Piece) -> Row:
    with _capped(setup, cap):
        return piece.run()


def _pass(setup: Setup, names: tuple[str, str], context: int, cap: int | None, width: int) -> Row:
    """The time of one pass, and of the bytes that it brings at the measured rate of the bus."""
    bus = setup.bus
    with _capped(setup, cap):
        models = setup.models(*names, context + 1024)
        pool = SharedKV(models, _setting(setup, context), 1, pages_for(context + 64)).pool.more(1)
        memory = _require_offloaded(pool.offloaded)
        pool.reserve(0, context + 64)
        fill(pool, context - 16)
        full, before = FullView(pool, grain=0), memory.bytes_read
        took = setup.seconds(partial(once, models.target, full, width), 3)
        brought = (memory.bytes_read - before) / 4
    return {"seconds": took, "bytes": brought, "bus": bus, "fraction_of_limit": brought / bus / took, "speedup": None}


def _decode(setup: Setup, names: tuple[str, str], context: int, cap: int | None, acceptance: str) -> Row:
    """Seconds a token with TriForce; `fraction_of_limit`: of the bus, while it verifies. The median of the turns."""
    bus, turns = setup.bus, []
    with _capped(setup, cap):
        models, memory = setup.models(*names, context + 1024), None
        for _ in range(decoding.TURNS):
            plain, memory, _ = _turn(setup, models, context, memory, "ar", {})
            outer, inner = decoding.RATES[acceptance]
            fast, memory, rate = _turn(setup, models, context, memory, "triforce", {2: outer, 1: inner})
            turns.append((plain, fast, rate))
    plain, fast, rate = (median(each) for each in zip(*turns, strict=True))
    speedups = [a / b for a, b, _ in turns]
    return {
        "seconds": fast, "plain_seconds": plain, "speedup": median(speedups), "spread": max(speedups) - min(speedups),
        "fraction_of_limit": rate / bus, "bus": bus,
    }  # fmt: skip


def _turn(
    setup: Setup, models: ModelSet, context: int, memory: FullView | None, mode: str, kept: dict[int, float]
) -> tuple[float, FullView, float]:
    """Seconds a token; the KV, to go on with; bytes a second that full passes brought."""
    batch = read(models, mode, _setting(setup, context), context, setup.tokens, memory=memory)
    full: FullView = batch.top.cache
    kv = _require_offloaded(full.pool.offloaded)
    before = kv.bytes_read
    seconds = decoding.timed(batch, kept)
    return seconds, full, (kv.bytes_read - before) / batch.stats(0)[-1].seconds


def _setting(setup: Setup, context: int) -> SpeculativeConfig:
    budget = Budget(min(4096, context // 2))
    return SpeculativeConfig(
        2, 6, retrieval=RetrievalConfig(budget), offload=OffloadConfig.parse("host", setup.kv_memory, "auto")
    )


def _require_offloaded(memory: Any) -> Any:
    if memory is None:
        raise RequestError("all of this KV fits on the device; give less with --kv-memory, or a longer --contexts")
    return memory

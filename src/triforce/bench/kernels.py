"""Each kernel against the bandwidth of the memory: bytes, seconds, GB/s, and the share of what has just been measured.

Shape suffixes as in backends/kernel_api.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from triforce.backends import native_loader
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import ForwardBatch, PageTable, pages_for
from triforce.backends.token_sampler import make_noise, sampling
from triforce.backends.torch.attention import attend_causal
from triforce.bench import shapes
from triforce.bench.synthetic import fill
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import PAGE, FullView, PagePool
from triforce.ragged import Ints, ints
from triforce.speculation import Draft, Seeded, SequenceState

Row = dict[str, Any]
WIDTHS = (1, 8, 16)
BUDGET = 1024
TURNS, SECONDS = 5, 0.1
"""Turns of each kernel, and seconds of a turn."""


def rows(contexts: Sequence[int], shape_names: Sequence[str]) -> Iterator[Row]:
    """Whole steps of each shape, prefill attention, and the sampler; the bandwidth before those that it limits."""
    for name in shape_names:
        decoder = shapes.decoder(name, max(contexts) + 64)
        lower = shapes.decoder(name, max(contexts) + 64, bits=8) if native_loader.native else None
        for context in contexts:
            yield from _steps(name, decoder, lower, context)
    yield from _prefill()
    for vocab in (8192, 128_256):
        yield from _sampler(vocab)


def in_turns(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Median seconds of each call. They take turns, so that a machine that becomes slower does so for all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(TURNS):
        for call, took in zip(calls, times, strict=True):
            call()  # what others left of the caches is no part of it
            began = now = perf_counter()
            while now < began + SECONDS:
                start = now
                call()
                now = perf_counter()
                took.append(now - start)
    return [median(took) for took in times]


def reading() -> tuple[Callable[[], object], int]:
    """Return a function that reads a gigabyte with the threads of the kernels, and the bytes."""
    many = torch.ones(1 << 27, dtype=torch.int64)
    if native := native_loader.native:
        return partial(native.read, many), many.nbytes
    return many.sum, many.nbytes


def _row(kernel: str, took: float, moved: int, bandwidth: float, **more: Any) -> Row:
    speed = moved / took / 1e9
    return {
        "kernel": kernel, **more, "bytes": moved, "seconds": took, "gb_per_second": speed, "fraction": speed / bandwidth
    }  # fmt: skip


def _steps(name: str, decoder: Decoder, lower: Decoder | None, context: int) -> Iterator[Row]:
    """Passes of a whole decoder: over the full cache at each width, and over a budget, in int8 too if it can be."""
    config, size = decoder.config, decoder.dtype.itemsize
    pool = PagePool(config, 1, pages_for(context + 64), decoder.dtype, int8=lower is not None)
    pool.reserve(0, context + 64)
    full = FullView(pool)
    full.observe(0)
    fill(pool, context)
    read, gigabyte = reading()
    all_of_it = (config.weights_read + config.kv_size * context) * size
    some = config.weights_read + config.kv_size * BUDGET
    kinds = [("step", width, partial(one_pass, decoder, full, width), all_of_it) for width in WIDTHS]
    kinds.append(("retrieval step", 1, partial(one_pass, decoder, SparseView(pool, BUDGET), 1), some * size))
    if lower:
        kinds.append(
            ("retrieval step, int8", 1, partial(one_pass, lower, SparseView(pool, BUDGET, int8=True), 1), some)
        )
    of_reading, *times = in_turns([read, *(call for _, _, call, _ in kinds)])
    bandwidth = gigabyte / of_reading / 1e9
    yield _row("read", of_reading, gigabyte, bandwidth, shape=name, context=context)
    for (kernel, width, _, moved), took in zip(kinds, times, strict=True):
        yield _row(kernel, took, moved, bandwidth, shape=name, context=context, width=width)


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
        starts = [self._units.shape[2] * PAGE - width]
        lists = PageTable(self._units, starts, counts_B.tolist(), coarse=starts if self._int8 else [])
        return ForwardBatch([int(self.lengths_B[0])], [(self.pool.config.layers, lists)])


def one_pass(decoder: Decoder, view: FullView, width: int) -> None:
    """Compute one pass of a row of `width` tokens."""
    # Not advanced: the next pass writes the same slots.
    decoder(torch.ones(1, width, dtype=torch.long), ints([width]), view)


def _prefill() -> Iterator[Row]:
    """Attention of one chunk of a prompt over all that came before it: ours, and torch's fused one."""
    context, width = 16_384, 512
    config = shapes.decoder("30m", context).config
    H, D = config.heads, config.head_dim
    pool = PagePool(config, 1, pages_for(context), torch.bfloat16)
    pool.reserve(0, context)
    fill(pool, context)
    q_BTHD = torch.randn(1, width, H, D).bfloat16()
    lists = PageTable(pool.units(range(1), PAGE), [context - width], [width])
    k_GSD, v_GSD = (x.contiguous() for x in pool.span(0, 0, 0, context))
    operations = 4 * width * (context - width // 2) * H * D
    threads = native_loader.native.threads() if native_loader.native else torch.get_num_threads()

    def torchs() -> None:
        torch.set_num_threads(threads)
        attend_causal(q_BTHD[0], k_GSD, v_GSD)
        torch.set_num_threads(1)

    times = in_turns([partial(pool.kv.attend, 0, q_BTHD, lists), torchs])
    for kernel, took in zip(("prefill attention", "prefill attention, torch"), times, strict=True):
        row = {"kernel": kernel, "context": context, "width": width, "seconds": took}
        yield row | {"gflop_per_second": operations / took / 1e9}


def _sampler(vocab: int) -> Iterator[Row]:
    """Yield rows on sampling one token from one row of logits, at common settings."""
    logits_BJV = torch.randn(1, 1, vocab, generator=torch.Generator().manual_seed(0)) * 3
    prefix, live_B = SequenceState(ints([0] * 8)[None], ints([4])), np.array([True])
    for temperature, top_p in ((0.0, 1.0), (0.6, 0.9), (1.0, 1.0)):
        params = [SamplingParams(temperature=temperature, top_p=top_p)]
        sampler = sampling(params, [4], vocab, Seeded(make_noise([1], [0])))
        nothing = Draft.empty(1, 0)
        (took,) = in_turns([partial(sampler.verify, nothing, logits_BJV, prefix, live_B, 0)])
        yield {"kernel": "sampler", "vocabulary": vocab, "temperature": temperature, "top_p": top_p, "seconds": took}

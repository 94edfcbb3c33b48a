"""Each kernel against the roofline of this machine: bytes, operations, seconds, and the share of what can be.

Shape suffixes as in backends/kernel_api.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triforce.backends import native_loader
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import ForwardBatch, PageTable, pages_for
from triforce.backends.token_sampler import make_noise, sampling
from triforce.backends.torch.attention import attend_causal
from triforce.bench import shapes
from triforce.bench.roofline import Roofline, Work, probes
from triforce.bench.synthetic import fill
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import PAGE, FullView, PagePool
from triforce.model.config import ModelConfig
from triforce.ragged import Ints, ints
from triforce.speculation import Draft, Seeded, SequenceState

Row = dict[str, Any]
WIDTHS = (1, 2, 4, 8, 16)
CODED = (1, 4, 8)
"""Widths over int8 KV."""
BUDGET = 1024
TURNS, SECONDS = 5, 0.1
"""Turns of each kernel, and seconds of a turn."""


def rows(contexts: Sequence[int], shape_names: Sequence[str]) -> Iterator[Row]:
    """Whole steps of each shape, prefill attention, and the sampler; what the machine can do before each shape."""
    for name in shape_names:
        model = Model(name, max(contexts) + 64)
        for context in contexts:
            yield from _steps(model, context)
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


def _row(kernel: str, took: float, work: Work, roof: Roofline, **more: Any) -> Row:
    least = roof.least_seconds(work)
    return {
        "kernel": kernel, **more, "bytes": work.bytes, "operations": dict(work.operations), "seconds": took,
        "gb_per_second": work.bytes / took / 1e9, "least_seconds": least, "fraction": least / took,
    }  # fmt: skip


def _machine(roof: Roofline, **more: Any) -> Iterator[Row]:
    yield {"kernel": "read", **more, "gb_per_second": roof.bandwidth / 1e9}
    for name, peak in roof.peaks.items():
        yield {"kernel": f"peak, {name}", **more, "gflop_per_second": peak / 1e9}


class Model:
    """A decoder of a shape and its int8 copy, if it has one; how many numbers its products read, in how many bytes."""

    def __init__(self, name: str, context: int) -> None:
        config, weights = shapes.parts(name, context)
        self.name, self.config, self.decoder = name, config, Decoder(config, weights)
        copies = native_loader.native is not None and weights.has_numbers
        self.lower = Decoder(config, weights, bits=8) if copies else None
        self.numbers = sum(math.prod(weight.shape) for weight in weights.multiplied())
        self.bytes = sum(w.nbytes if isinstance(w, Tensor) else w.blocks.nbytes for w in weights.multiplied())
        self._products = "bfloat16" if weights.has_numbers else "int16"

    def coded(self, context: int) -> FullView:
        """Return a view of so much KV as int8, which the decoder reads as it reads its own."""
        config = replace(self.config, kv_int8=True)
        return filled(PagePool(config, 1, pages_for(context + 64), self.decoder.dtype), context)

    def work(self, width: int, keys: int, config: ModelConfig | None = None) -> Work:
        """Work of a pass of so many tokens, each over so many keys, as this config or the model's own has them."""
        products, attention = self._operations(width, keys)
        config = config or self.config
        computed = "int16" if config.kv_int8 else "bfloat16"
        operations = Counter({self._products: products}) + Counter({computed: attention})
        return Work(self.bytes + config.kv_bytes(2) * keys, operations)

    def int8_work(self, width: int, keys: int) -> Work:
        return Work(self.numbers + self.config.kv_size * keys, {"int8": sum(self._operations(width, keys))})

    def _operations(self, width: int, keys: int) -> tuple[int, int]:
        """Operations of products with weights, and of attention."""
        queries = self.config.layers * self.config.heads * self.config.head_dim
        return 2 * width * self.numbers, 4 * width * keys * queries


def _steps(model: Model, context: int) -> Iterator[Row]:
    """Passes of a whole decoder: over the full cache at each width, and over a budget, in int8 too if it can be."""
    decoder, about = model.decoder, {"shape": model.name, "context": context}
    pool = PagePool(model.config, 1, pages_for(context + 64), decoder.dtype, int8=model.lower is not None)
    full = filled(pool, context)
    kinds = [("step", w, partial(one_pass, decoder, full, w), model.work(w, context)) for w in WIDTHS]
    coded = model.coded(context)
    kinds += [
        ("step, int8 KV", w, partial(one_pass, decoder, coded, w), model.work(w, context, coded.pool.config))
        for w in CODED
    ]
    some = SparseView(pool, BUDGET)
    kinds.append(("retrieval step", 1, partial(one_pass, decoder, some, 1), model.work(1, BUDGET)))
    if model.lower:
        some = SparseView(pool, BUDGET, int8=True)
        kinds.append(("retrieval step, int8", 1, partial(one_pass, model.lower, some, 1), model.int8_work(1, BUDGET)))
    calls, roofline = probes()
    times = in_turns([*calls, *(call for _, _, call, _ in kinds)])
    roof = roofline(times[: len(calls)])
    yield from _machine(roof, **about)
    for (kernel, width, _, work), took in zip(kinds, times[len(calls) :], strict=True):
        yield _row(kernel, took, work, roof, width=width, **about)


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

    calls, roofline = probes()
    times = in_turns([*calls, partial(pool.kv.attend, 0, q_BTHD, lists), torchs])
    roof, work = roofline(times[: len(calls)]), Work(k_GSD.nbytes + v_GSD.nbytes, {"bfloat16": operations})
    for kernel, took in zip(("prefill attention", "prefill attention, torch"), times[len(calls) :], strict=True):
        row = _row(kernel, took, work, roof, context=context, width=width)
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

"""Each kernel against the roofline of this machine: bytes, operations, seconds, and the share of what can be.

Shape suffixes as in backends/kernel_api.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import ForwardBatch, PageTable, pages_for
from triforce.backends.token_sampler import make_noise, sampling
from triforce.backends.torch.attention import attend_causal
from triforce.bench import shapes
from triforce.bench import shapes as bench_shapes
from triforce.bench.roofline import ModelWork, Roofline, Work, coded_attention, probes
from triforce.bench.synthetic import fill
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import PAGE, FullView, PagePool
from triforce.kvcache.views.full import windowed
from triforce.model.expert_unions import SAMPLED
from triforce.ragged import Ints, ints
from triforce.speculation import Draft, Seeded, SequenceState


class Model:
    """A decoder of a shape and its int8 copy, if it has one, and the work of their passes."""

    def __init__(self, name: str, context: int) -> None:
        config, weights = bench_shapes.decoder_parts(name, context)
        self.name = name
        self.config = config
        self.decoder = Decoder(config, weights)
        copies = dispatch.native is not None and weights.has_numbers
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
        before_B = view.lengths_B.copy()
        _, output = self.decoder.observe(ids(width), ints([width]), view, None, ())
        view.rewind(before_B)
        assert self.decoder.unions, "it has experts"
        return output.touched / experts.active if width <= SAMPLED else float(self.decoder.unions.times(width))


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
        length = int(pool.lengths_B[0])
        pages = budget // PAGE - 1
        dice = torch.Generator().manual_seed(0)
        picks_GP = torch.stack([torch.randperm(length // PAGE, generator=dice) for _ in range(pool.config.kv_heads)])
        units_BGU = torch.cat([picks_GP[:, :pages].sort(1).values, picks_GP[:, -1:]], 1)[None].int() + 1
        self._units = units_BGU.to(pool.device)

    def begin(self, counts_B: Ints, width: int) -> ForwardBatch:
        starts = [self._units.shape[2] * PAGE - width]
        counts = counts_B.tolist()
        lists = PageTable(self._units, starts, counts, coarse=starts if self._int8 else [])
        length = int(self.lengths_B[0])
        see = windowed(self.pool, PageTable(self.pool.units(range(1), PAGE), [length], counts), range(1))
        grouped = [(window, len([*group])) for window, group in groupby(self.pool.config.windows)]
        return ForwardBatch([length], [(count, see(window) if window else lists) for window, count in grouped])


def one_pass(decoder: Decoder, view: FullView, width: int) -> None:
    """Compute one pass of a row of `width` tokens. The next one writes the same slots."""
    decoder.run(ids(width), view.kv, view.begin(ints([width]), width), None)


def ids(width: int) -> Tensor:
    """Tokens of a pass (1, T), no two alike: a mixture of experts reads the same ones for the same token."""
    return torch.arange(1, width + 1)[None]


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
        yield from _shape(name, contexts)
    yield from _prefill()
    for vocab in (8192, 128_256):
        yield from _sampler(vocab)


def _shape(name: str, contexts: Sequence[int]) -> Iterator[Row]:
    """Yield the steps of a shape, whose memory is free before the next one's is taken."""
    model = Model(name, max(contexts) + 64)
    for context in contexts:
        yield from _steps(model, context)


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


def _steps(model: Model, context: int) -> Iterator[Row]:
    """Passes of a whole decoder: over the full cache at each width, and over a budget, in int8 too if it can be."""
    decoder = model.decoder
    about = {"shape": model.name, "context": context}
    work = model.work.of
    of_lower = model.work.of_lower
    pool = PagePool(model.config, 1, pages_for(context + 64), decoder.dtype, int8=model.lower is not None)
    full = filled(pool, context)
    unions = {width: model.union(full, width) for width in WIDTHS}
    kinds = [("step", w, partial(one_pass, decoder, full, w), work(w, context, union=unions[w])) for w in WIDTHS]
    coded = model.coded(context)
    kinds += [
        ("step, int8 KV", w, partial(one_pass, decoder, coded, w),
         work(w, context, coded.pool.config, unions[w]))
        for w in CODED
    ]  # fmt: skip
    nibbles = SparseView(coded.pool, context, int8=True)
    of_nibbles = model.coded_work.of_lower(1, context, 16)
    kinds.append(("step, upper nibbles of int8 KV", 1, partial(one_pass, decoder, nibbles, 1), of_nibbles))
    some = SparseView(pool, BUDGET)
    kinds.append(("retrieval step", 1, partial(one_pass, decoder, some, 1), work(1, BUDGET)))
    if model.lower:
        some = SparseView(pool, BUDGET, int8=True)
        kinds.append(("retrieval step, int8", 1, partial(one_pass, model.lower, some, 1), of_lower(1, BUDGET, 8)))
    calls, roofline = probes()
    times = in_turns([*calls, *(call for _, _, call, _ in kinds)])
    roof = roofline(times[: len(calls)])
    yield from _machine(roof, **about)
    for (kernel, width, _, needed), took in zip(kinds, times[len(calls) :], strict=True):
        more = about | ({"union": unions[width]} if model.decoder.unions else {})
        yield _row(kernel, took, needed, roof, width=width, **more)


def _prefill() -> Iterator[Row]:
    """Attention of one chunk of a prompt over all that came before it: ours, with int8 KV, and torch's fused one."""
    context = 16_384
    width = 512
    config, _ = shapes.parts("30m", context)
    H = config.heads
    D = config.head_dim
    q_BTHD = torch.randn(1, width, H, D).bfloat16()
    pools = [PagePool(replace(config, kv_int8=int8), 1, pages_for(context), torch.bfloat16) for int8 in (False, True)]
    ours = []
    for pool in pools:
        pool.reserve(0, context)
        fill(pool, context)
        lists = PageTable(pool.units(range(1), PAGE), [context - width], [width])
        ours.append(partial(pool.kv.attend, 0, q_BTHD, lists))
    k_GSD, v_GSD = (x.contiguous() for x in pools[0].span(0, 0, 0, context))
    operations = 4 * width * (context - width // 2) * H * D
    read = k_GSD.nbytes + v_GSD.nbytes
    threads = dispatch.native.threads() if dispatch.native else torch.get_num_threads()

    def torchs() -> None:
        torch.set_num_threads(threads)
        attend_causal(q_BTHD[0], k_GSD, v_GSD)
        torch.set_num_threads(1)

    calls, roofline = probes()
    times = in_turns([*calls, *ours, torchs])
    roof = roofline(times[: len(calls)])
    work = Work(read, {"bfloat16": operations})
    coded = Work(read * pools[1].config.kv_bytes(2) // config.kv_bytes(2), coded_attention(operations))
    names = {"prefill attention": work, "prefill attention, int8 KV": coded, "prefill attention, torch": work}
    for (kernel, work), took in zip(names.items(), times[len(calls) :], strict=True):
        row = _row(kernel, took, work, roof, context=context, width=width)
        yield row | {"gflop_per_second": operations / took / 1e9}


def _sampler(vocab: int) -> Iterator[Row]:
    """Yield rows on sampling one token from one row of logits, at common settings."""
    logits_BJV = torch.randn(1, 1, vocab, generator=torch.Generator().manual_seed(0)) * 3
    prefix = SequenceState(ints([0] * 8)[None], ints([4]))
    live_B = np.array([True])
    for temperature, top_p in ((0.0, 1.0), (0.6, 0.9), (1.0, 1.0)):
        params = [SamplingParams(temperature=temperature, top_p=top_p)]
        sampler = sampling(params, [4], vocab, Seeded(make_noise([1], [0])))
        nothing = Draft.empty(1, 0)
        (took,) = in_turns([partial(sampler.verify, nothing, logits_BJV, prefix, live_B, 0)])
        yield {"kernel": "sampler", "vocabulary": vocab, "temperature": temperature, "top_p": top_p, "seconds": took}

"""Kernels against the roofline of this machine: bytes, operations, seconds, and the fraction of the roofline.

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

from triforce.arrays import to_host
from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import ForwardBatch, PageTable, pages_for
from triforce.backends.token_sampler import make_noise, sampler_array, sampling
from triforce.backends.torch.attention import attend_causal
from triforce.backends.torch.tensors import as_tensor
from triforce.bench import shapes as bench_shapes
from triforce.bench.roofline import ModelWork, Roofline, Work, coded_attention, probes
from triforce.bench.synthetic import fill
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import PAGE, FullView, PagePool
from triforce.kvcache.views.full import table_by_window
from triforce.model.expert_unions import SAMPLED_TOKENS
from triforce.ragged import Ints, ints
from triforce.speculation import Draft, Seeded, SequenceState


class MeasuredModel:
    """A decoder of a shape, its int8 copy if kernels for one exist, and the work of passes.

    `work` is that of passes over KV of the decoder's dtype, `int8_work` that of passes over int8 KV.
    """

    def __init__(self, name: str, context: int) -> None:
        config, weights = bench_shapes.decoder_parts(name, context)
        self.name = name
        self.config = config
        self.decoder = Decoder(config, weights)
        copies = dispatch.native is not None and weights.has_numbers
        self.lower = Decoder(config, weights, bits=8) if copies else None
        self.work, self.int8_work = (ModelWork(replace(config, kv_int8=int8), weights) for int8 in (False, True))

    def int8_view(self, context: int) -> FullView:
        """Return a view of `context` tokens of int8 KV, which the decoder reads like KV of its own dtype."""
        config = replace(self.config, kv_int8=True)
        return filled_view(PagePool(config, 1, pages_for(context + 64), self.decoder.dtype), context)


def expert_union(decoder: Decoder, view: FullView, width: int) -> float:
    """Return the number of experts that a pass of `width` tokens reads, as a multiple of those of one token."""
    experts = decoder.config.architecture.experts
    if experts is None:
        return 1.0
    start_lengths_B = view.lengths_B.copy()
    _, output = decoder.observe(ids(width), ints([width]), view, None, ())
    view.rewind(start_lengths_B)
    assert decoder.unions, "it has experts"
    return (
        output.mean_distinct_experts / experts.active
        if width <= SAMPLED_TOKENS
        else float(decoder.unions.multiple(width))
    )


def filled_view(pool: PagePool, context: int) -> FullView:
    """Return a view of `context` tokens of random KV, with room for `WIDEST` more."""
    pool.reserve(0, context + WIDEST)
    view = FullView(pool)
    view.observe(0)
    fill(pool, context)
    return view


class SparseView(FullView):
    """A view of `budget` tokens in pages spread over the context, with its own page list for each KV head."""

    def __init__(self, pool: PagePool, budget: int, int8: bool = False) -> None:
        super().__init__(pool, grain=0)
        self._int8 = int8
        length = int(pool.lengths_B[0])
        pages = budget // PAGE - 1
        generator = torch.Generator().manual_seed(0)
        picks_GP = torch.stack(
            [torch.randperm(length // PAGE, generator=generator) for _ in range(pool.config.kv_heads)]
        )
        units_BGU = torch.cat([picks_GP[:, :pages].sort(1).values, picks_GP[:, -1:]], 1)[None].int() + 1
        self._units = pool.kv.array(to_host(units_BGU))

    def begin(self, counts_B: Ints, width: int) -> ForwardBatch:
        starts = [self._units.shape[2] * PAGE - width]
        counts = counts_B.tolist()
        page_table = PageTable(self._units, starts, counts, low_precision_ends=starts if self._int8 else [])
        length = int(self.lengths_B[0])
        window_tables = table_by_window(
            self.pool, PageTable(self.pool.units(range(1), PAGE), [length], counts), range(1)
        )
        window_runs = [(window, len([*group])) for window, group in groupby(self.pool.config.windows)]
        return ForwardBatch(
            [length], [(count, window_tables(window) if window else page_table) for window, count in window_runs]
        )


def one_pass(decoder: Decoder, view: FullView, width: int) -> None:
    """Compute one pass of one row of `width` tokens. Every call writes the same slots."""
    decoder.run(ids(width), view.kv, view.begin(ints([width]), width), None)


def ids(width: int) -> Ints:
    """Return distinct tokens of a pass (1, T): a mixture of experts reads the same experts for equal tokens."""
    return np.arange(1, width + 1)[None]


Row = dict[str, Any]
WIDTHS = (1, 2, 4, 8, 16)
WIDEST = 64
"""Tokens of the widest pass behind a filled view."""
INT8_WIDTHS = (1, 4, 8)
"""Widths of passes over int8 KV."""
BUDGET = 1024
TURNS, SECONDS = 5, 0.1
"""Turns of each kernel, and least seconds of a turn."""


def rows(contexts: Sequence[int], shape_names: Sequence[str]) -> Iterator[Row]:
    """Yield rows of whole steps of each shape, prefill attention, and the sampler.

    Rows of the machine's measured rates come before the rows of each context.
    """
    for name in shape_names:
        yield from _shape(name, contexts)
    yield from _prefill()
    for vocab in (8192, 128_256):
        yield from _sampler(vocab)


def _shape(name: str, contexts: Sequence[int]) -> Iterator[Row]:
    """Yield rows of the steps of a shape. Its memory is freed before the next shape's is allocated."""
    model = MeasuredModel(name, max(contexts) + 64)
    for context in contexts:
        yield from _steps(model, context)


def interleaved_seconds(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Return median seconds of each call. The calls take turns, so that a machine that slows down slows all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(TURNS):
        for call, call_seconds in zip(calls, times, strict=True):
            call()  # untimed: it warms the caches after the other calls
            turn_start = call_end = perf_counter()
            while call_end < turn_start + SECONDS:
                call_start = call_end
                call()
                call_end = perf_counter()
                call_seconds.append(call_end - call_start)
    return [median(call_seconds) for call_seconds in times]


def kernel_row(kernel: str, seconds: float, work: Work, roof: Roofline, **extra_fields: Any) -> Row:
    """Return a kernel's work and seconds beside the least seconds of that work on this machine."""
    least_seconds = roof.least_seconds(work)
    return {
        "kernel": kernel, **extra_fields, "bytes": work.bytes, "operations": dict(work.operations), "seconds": seconds,
        "gb_per_second": work.bytes / seconds / 1e9, "least_seconds": least_seconds,
        "fraction": least_seconds / seconds,
    }  # fmt: skip


def machine_rows(roof: Roofline, **extra_fields: Any) -> Iterator[Row]:
    """Yield rows of this machine's rates."""
    yield {"kernel": "read", **extra_fields, "gb_per_second": roof.bandwidth / 1e9}
    for name, peak in roof.peaks.items():
        yield {"kernel": f"peak, {name}", **extra_fields, "gflop_per_second": peak / 1e9}


def _steps(model: MeasuredModel, context: int) -> Iterator[Row]:
    """Yield rows of passes of a whole decoder: over the full cache by width, over a budget, and in int8 if possible."""
    decoder = model.decoder
    cell_fields = {"shape": model.name, "context": context}
    work_of = model.work.pass_work
    lower_work_of = model.work.lower_pass_work
    pool = PagePool(model.config, 1, pages_for(context + 64), decoder.dtype, int8=model.lower is not None)
    full_view = filled_view(pool, context)
    unions = {width: expert_union(decoder, full_view, width) for width in WIDTHS}
    kinds = [
        ("step", w, partial(one_pass, decoder, full_view, w), work_of(w, context, union=unions[w])) for w in WIDTHS
    ]
    int8_view = model.int8_view(context)
    kinds += [
        ("step, int8 KV", w, partial(one_pass, decoder, int8_view, w),
         work_of(w, context, int8_view.pool.config, unions[w]))
        for w in INT8_WIDTHS
    ]  # fmt: skip
    nibble_view = SparseView(int8_view.pool, context, int8=True)
    nibble_work = model.int8_work.lower_pass_work(1, context, 16)
    kinds.append(("step, upper nibbles of int8 KV", 1, partial(one_pass, decoder, nibble_view, 1), nibble_work))
    selected_view = SparseView(pool, BUDGET)
    kinds.append(("retrieval step", 1, partial(one_pass, decoder, selected_view, 1), work_of(1, BUDGET)))
    if model.lower:
        selected_view = SparseView(pool, BUDGET, int8=True)
        kinds.append(
            ("retrieval step, int8", 1, partial(one_pass, model.lower, selected_view, 1), lower_work_of(1, BUDGET, 8))
        )
    calls, roofline = probes()
    times = interleaved_seconds([*calls, *(call for _, _, call, _ in kinds)])
    roof = roofline(times[: len(calls)])
    yield from machine_rows(roof, **cell_fields)
    for (kernel, width, _, step_work), seconds in zip(kinds, times[len(calls) :], strict=True):
        extra_fields = cell_fields | ({"union": unions[width]} if model.decoder.unions else {})
        yield kernel_row(kernel, seconds, step_work, roof, width=width, **extra_fields)


def _prefill() -> Iterator[Row]:
    """Yield rows of a prompt chunk's attention over all earlier tokens: ours, ours over int8 KV, torch's fused one."""
    context = 16_384
    width = 512
    config = bench_shapes.config_of("30m", context)
    H = config.heads
    D = config.head_dim
    q_BTHD = torch.randn(1, width, H, D).bfloat16()
    pools = [PagePool(replace(config, kv_int8=int8), 1, pages_for(context), "bfloat16") for int8 in (False, True)]
    kernel_calls = []
    for pool in pools:
        pool.reserve(0, context)
        fill(pool, context)
        page_table = PageTable(pool.units(range(1), PAGE), [context - width], [width])
        kernel_calls.append(partial(pool.kv.attend, 0, pool.kv.array(to_host(q_BTHD)), page_table))
    k_GSD, v_GSD = (as_tensor(x).contiguous() for x in pools[0].span(0, 0, 0, context))
    operations = 4 * width * (context - width // 2) * H * D
    read_bytes = k_GSD.nbytes + v_GSD.nbytes
    threads = dispatch.native.threads() if dispatch.native else torch.get_num_threads()

    def torch_attention() -> None:
        torch.set_num_threads(threads)
        attend_causal(q_BTHD[0], k_GSD, v_GSD)
        torch.set_num_threads(1)

    calls, roofline = probes()
    times = interleaved_seconds([*calls, *kernel_calls, torch_attention])
    roof = roofline(times[: len(calls)])
    work = Work(read_bytes, {"bfloat16": operations})
    int8_work = Work(read_bytes * pools[1].config.kv_bytes(2) // config.kv_bytes(2), coded_attention(operations))
    names = {"prefill attention": work, "prefill attention, int8 KV": int8_work, "prefill attention, torch": work}
    for (kernel, work), seconds in zip(names.items(), times[len(calls) :], strict=True):
        row = kernel_row(kernel, seconds, work, roof, context=context, width=width)
        yield row | {"gflop_per_second": operations / seconds / 1e9}


def _sampler(vocab: int) -> Iterator[Row]:
    """Yield rows of sampling one token from one row of logits, at common settings."""
    random_logits_BJV = torch.randn(1, 1, vocab, generator=torch.Generator().manual_seed(0)) * 3
    logits_BJV = sampler_array(to_host(random_logits_BJV), "cpu")
    prefix = SequenceState(ints([0] * 8)[None], ints([4]))
    live_B = np.array([True])
    for temperature, top_p in ((0.0, 1.0), (0.6, 0.9), (1.0, 1.0)):
        params = [SamplingParams(temperature=temperature, top_p=top_p)]
        sampler = sampling(params, [4], vocab, Seeded(make_noise([1], [0])))
        empty_draft = Draft.empty(1, 0)
        (seconds,) = interleaved_seconds([partial(sampler.verify, empty_draft, logits_BJV, prefix, live_B, 0)])
        yield {"kernel": "sampler", "vocabulary": vocab, "temperature": temperature, "top_p": top_p, "seconds": seconds}

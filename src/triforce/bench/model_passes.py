"""Passes of a model by context and width, the least time of their work, and the seconds of their parts.

Parts are timed by themselves. Products: all matrices of a type, one after another, and then those of the next type, so
that each is read from memory as in a pass. Attention: that of all layers over the same KV.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triforce.arrays import dtype_name, rounded
from triforce.backends import dispatch
from triforce.backends.kernel_api import pages_for
from triforce.bench.kernels import (
    SECONDS,
    TURNS,
    WIDEST,
    expert_union,
    filled_view,
    interleaved_seconds,
    kernel_row,
    machine_rows,
    one_pass,
)
from triforce.bench.roofline import ModelWork, Work, probes, type_of_products
from triforce.engine.model_loader import Checkpoint
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import FullView, PagePool
from triforce.llm import LLM
from triforce.model.weights import Matrix, QuantizedWeight, Weights, nbytes
from triforce.ragged import ints

Row = dict[str, Any]
Announce = Callable[[str], None]
"""Tells a terminal what is measured next."""

OURS = "triforce"
INT8_INPUTS = " by int8"
"""Ending of the type of matrices whose products take int8 inputs."""
WARM_TOKENS = 64
READINGS = 3
LONG = 20.0
"""Seconds of readings of a prompt after which it is not read once more."""


@dataclass(frozen=True)
class PassPlan:
    """Lengths of the prompts that are read, and contexts and widths of the passes that are timed."""

    prompts: Sequence[int]
    contexts: Sequence[int]
    widths: Sequence[int]
    vocabulary: int

    @cached_property
    def ids(self) -> list[int]:
        """Random tokens, as many as the longest prompt or context: prompts begin with them."""
        length = max(*self.prompts, *self.contexts, WARM_TOKENS)
        drawn: list[int] = np.random.default_rng(1).integers(self.vocabulary, size=length).tolist()
        return drawn


def rows(llm: LLM, weights: Weights, plan: PassPlan, announce: Announce) -> Iterator[Row]:
    """Yield rows of prompts, of passes and of their parts. The model is closed before its products are timed.

    weights: those of the model's files.
    """
    target = llm.target
    int8_inputs = target.config.int8_inputs
    yield from (row | {"engine": OURS} for row in _prompts(llm, plan, announce))
    for context in plan.contexts:
        announce(f"passes after {context:,} tokens")
        yield from (row | {"engine": OURS} for row in _passes(target, weights, context, plan.widths))
    llm.close()
    del llm, target
    announce("products")
    yield from (row | {"engine": OURS} for row in _products(weights, plan.widths, int8_inputs))


def prompt_row(tokens: int, read: Callable[[], float]) -> Row:
    """Return the row of a prompt. read: reads it, and returns its seconds."""
    began = perf_counter()
    seconds = [read()]
    while len(seconds) < READINGS and perf_counter() - began < LONG:
        seconds.append(read())
    return {
        "kernel": "prompt",
        "tokens": tokens,
        "seconds": median(seconds),
        "tokens_per_second": tokens / median(seconds),
    }


def _prompts(llm: LLM, plan: PassPlan, announce: Announce) -> Iterator[Row]:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def read(length: int) -> float:
        llm.reset_prefix_cache()
        (output,) = llm.generate([plan.ids[:length]], params, mode="ar")
        return output.prefill_seconds

    read(WARM_TOKENS)
    for length in plan.prompts:
        announce(f"a prompt of {length:,} tokens")
        yield prompt_row(length, partial(read, length))


def _passes(target: Checkpoint, weights: Weights, context: int, widths: Sequence[int]) -> Iterator[Row]:
    """Yield rows of passes and of their attention, over random KV."""
    decoder = target.decoder
    config = target.config
    view = filled_view(PagePool(config, 1, pages_for(context + WIDEST), decoder.dtype), context)
    passes = [partial(one_pass, decoder, view, width) for width in widths]
    work = ModelWork(config, weights)
    works = [work.pass_work(width, context, union=expert_union(decoder, view, width)) for width in widths]
    attentions = [_attention(view, width) for width in widths]
    calls, roofline = probes()
    times = interleaved_seconds([*calls, *passes, *attentions])
    roof = roofline(times[: len(calls)])
    pass_seconds = times[len(calls) : -len(widths)]
    yield from machine_rows(roof, context=context)
    for width, pass_work, seconds in zip(widths, works, pass_seconds, strict=True):
        ratio = seconds / pass_seconds[0]
        yield kernel_row("pass", seconds, pass_work, roof, context=context, width=width, over_narrowest=ratio)
    for width, seconds in zip(widths, times[-len(widths) :], strict=True):
        yield {"kernel": "attention", "context": context, "width": width, "seconds": seconds}


def _attention(view: FullView, width: int) -> Callable[[], object]:
    """Return a call of the attention of all layers in a pass of `width` tokens."""
    tables_L = view.begin(ints([width]), width).layer_tables()
    config = view.pool.config
    q_BTHD = view.kv.array(rounded(_normal(1, width, config.heads, config.head_dim), view.pool.dtype))
    return lambda: [view.kv.attend(layer, q_BTHD, page_table) for layer, page_table in enumerate(tables_L)]


def _products(weights: Weights, widths: Sequence[int], int8_inputs: bool) -> Iterator[Row]:
    """Yield rows of the products with all matrices of each type, but for those of experts.

    int8_inputs: see `ModelConfig`; matrices with such inputs are a type of their own.
    """
    int8_ids = {id(matrix) for matrix in weights.int8_input_matrices()} if int8_inputs else set()
    by_type: dict[str, list[Matrix]] = defaultdict(list)
    experts = {id(part) for layer in weights.layers for expert in layer.experts for part in expert.weights()}
    for weight in weights.product_matrices():
        if id(weight) not in experts:
            name = weight.kind if isinstance(weight, QuantizedWeight) else dtype_name(weight)
            by_type[name + INT8_INPUTS * (id(weight) in int8_ids)].append(weight)
    calls, roofline = probes()
    roof = roofline(interleaved_seconds(calls))
    numbers = type_of_products(not weights.has_numbers, weights.dtype)
    for width, by_name in zip(widths, _product_seconds(by_type, widths), strict=True):
        for name, seconds in by_name.items():
            operations = sum(2 * width * math.prod(matrix.shape) for matrix in by_type[name])
            type_of_inputs = "int8" if name.endswith(INT8_INPUTS) else numbers
            work = Work(sum(map(nbytes, by_type[name])), {type_of_inputs: operations})
            rate = operations / seconds / 1e9
            yield kernel_row("products", seconds, work, roof, type=name, width=width, gflop_per_second=rate)


def _product_seconds(by_type: Mapping[str, Sequence[Matrix]], widths: Sequence[int]) -> Iterator[dict[str, float]]:
    """Yield for each width the median seconds of the products of each type. All types take turns, as in a pass."""
    assert dispatch.native, "the command has asked for them"
    packed = {name: [dispatch.native.Matrix(matrix) for matrix in matrices] for name, matrices in by_type.items()}
    all_matrices = [matrix for matrices in by_type.values() for matrix in matrices]
    for width in widths:
        times: dict[str, list[float]] = {name: [] for name in by_type}
        x = {(dtype_name(m), m.shape[1]): rounded(_normal(width, m.shape[1]), dtype_name(m)) for m in all_matrices}
        y = {m.shape[0]: np.empty((width, m.shape[0]), np.float32) for m in all_matrices}
        products = {
            name: [
                partial(
                    native_matrix.linear,
                    x[dtype_name(matrix), matrix.shape[1]],
                    y[matrix.shape[0]],
                    int8_inputs=name.endswith(INT8_INPUTS),
                )
                for native_matrix, matrix in zip(packed[name], matrices, strict=True)
            ]
            for name, matrices in by_type.items()
        }
        ends = perf_counter() + TURNS * SECONDS
        while min(map(len, times.values())) < TURNS or perf_counter() < ends:
            for name, calls in products.items():
                began = perf_counter()
                for call in calls:
                    call()
                times[name].append(perf_counter() - began)
        yield {name: median(seconds) for name, seconds in times.items()}


def _normal(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(2).standard_normal(shape, np.float32)


def parts(engine_rows: Sequence[Row], context: int, width: int) -> dict[str, float]:
    """Return the seconds of the parts of a pass by name. `rest` is what the others leave of it."""
    cell = [row for row in engine_rows if row.get("width") == width and row.get("context", context) == context]
    (pass_seconds,) = (row["seconds"] for row in cell if row["kernel"] == "pass")
    named = {f"products, {row['type']}": row["seconds"] for row in cell if row["kernel"] == "products"}
    named |= {row["kernel"]: row["seconds"] for row in cell if row["kernel"] == "attention"}
    return named | {"rest": pass_seconds - sum(named.values())}

"""Launches of every Triton kernel as the engine makes them, at the sizes of real models: nothing is run.

All tensors are on the meta device, so that 131,071 keys cost nothing, and each launch is recorded instead of run. The
compiler must be on: TRITON_INTERPRET=0 before this is imported. Shape suffixes as in backends/kernel_api.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from triton.runtime.jit import JITFunction

from tests.helpers.cuda.compiled import STRICT
from triforce.arrays import HOST_TYPES, DType
from triforce.backends import current_device
from triforce.backends.cuda import graphs
from triforce.backends.cuda.graphs import shape_of
from triforce.backends.cuda.kv import TritonKV
from triforce.backends.cuda.model import DraftInputs, DraftShape, TritonModel, run_draft
from triforce.backends.cuda.packed_weight import FORMATS, PackedWeight, packed
from triforce.backends.cuda.triton import pointwise, rng, sampler, topk, weight_tiles
from triforce.backends.cuda.triton.kv_tiles import copy_pages
from triforce.backends.kernel_api import PAGE, ForwardBatch, PageTable, pages_for
from triforce.bench import shapes
from triforce.bench.shapes import ModelShape
from triforce.checkpoint.model_families import LLAMA_NAMES
from triforce.checkpoint.weights import layer_of, layer_sources
from triforce.distributed.group import ALONE
from triforce.model.config import ModelConfig
from triforce.model.weights import QuantizedWeight, Weights

META = "meta"
KEYS = 131_071
BUDGET = 4096
SINKS = 16
WINDOW = 496
DRAFTED = 2
WIDTHS = 1, 8, 16
MODELS = {
    "Llama-2-7B": shapes.SHAPES["llama-2-7b-128k"],
    "Llama-3.1-8B": shapes.SHAPES["llama-3.1-8b"],
    "Qwen3-8B": ModelShape(4096, 12_288, 36, 32, 8, 151_936, 128, tied=False),
    "shipped target": ModelShape(256, 688, 6, 4, 4, 8192),
    "heads of 256": ModelShape(2048, 16_384, 18, 8, 1, 256_000, 256),
}
DRAFTS = {"Llama-68M": shapes.SHAPES["llama-68m"], "shipped draft": ModelShape(128, 344, 2, 2, 2, 8192)}


@dataclass(frozen=True)
class Launch:
    """A kernel and its arguments; `case` names the caller."""

    case: str
    kernel: JITFunction
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    grid: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first tensor."""
        return next(x.dtype for x in self.arguments if isinstance(x, torch.Tensor))


class Recorder:
    def __init__(self) -> None:
        self.case = ""
        self.launches = list[Launch]()

    def note(self, kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Record a launch, in place of `JITFunction.run`."""
        self.launches.append(Launch(self.case, kernel, arguments, options, grid))


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Record launches instead of running them, within a block. No code takes the meta device for a GPU there."""
    recorder = Recorder()
    with (
        patch.object(JITFunction, "run", lambda kernel, *args, **how: recorder.note(kernel, *args, **how)),
        patch.object(graphs, "is_gpu", lambda device: False),
        patch.object(current_device, "is_gpu", lambda device: False),
    ):
        yield recorder


def everything() -> list[Launch]:
    """Return the launches of models, samplers, selections and copies."""
    with recorded() as recorder:
        for name, shape in MODELS.items():
            for width in WIDTHS:
                recorder.case = f"{name}, width {width}"
                target(shape, width)
        for name, shape in DRAFTS.items():
            recorder.case = f"{name}, drafting"
            drafting(shape)
        for name, cases in STRICT.items():
            for observes, recorder.case in cases.items():
                verifying(*parts(MODELS[name]), 8, observes, (8, 32))
        recorder.case = "float32"
        for width in (1, 8, 32):
            target(MODELS["Llama-2-7B"], width, dtype="float32")
        for vocabulary in (8192, 32_000, 128_256):
            recorder.case = f"vocabulary of {vocabulary:,}"
            sampling(vocabulary)
        for width in WIDTHS:
            recorder.case = f"Llama-3.1-8B, width {width}, int8 KV"
            target(MODELS["Llama-3.1-8B"], width, kv_int8=True)
        for dtype in ("bfloat16", "float32"):
            recorder.case = f"heads of 64, {dtype}, int8 KV"
            target(shapes.SHAPES["llama-3.2-1b"], 8, dtype=dtype, kv_int8=True)
        for kind in FORMATS:
            recorder.case = f"weights of type {kind}"
            multiplying(kind)
        recorder.case = "others"
        others()
    return recorder.launches


def target(shape: ModelShape, width: int, **how: Any) -> None:
    """Run a verifying pass that observes the mass, and a retrieval pass of selected pages. how: options of `parts`."""
    verifying(*(model_parts := parts(shape, **how)), width)
    own_pages = PageTable(table(1, 1, shape.kv_heads, pages_for(BUDGET)), [BUDGET - width], [width])
    run(*model_parts, width, ForwardBatch([KEYS - width], [(1, own_pages)]))


def verifying(decoder: TritonModel, kv: TritonKV, width: int, mass: bool = True, least_counts: Any = (1, 1)) -> None:
    """Run a pass over all keys. mass: whether it is observed, as in verifications and not in plain decoding."""
    shared = PageTable(table(1, pages_for(KEYS)), [KEYS - width], [width])
    run(decoder, kv, width, ForwardBatch([KEYS - width], [(1, shared)], mass, mass, least_counts))


def drafting(shape: ModelShape) -> None:
    """Run passes over sinks and a window with their draws, by the race and by laws: two tokens, in one graph."""
    for race in (True, False):
        draft_of(shape, race)()


def draft_of(shape: ModelShape, race: bool) -> Callable[[], object]:
    """Return the call that makes such a draft."""
    decoder, kv = parts(shape)
    window = PageTable(table(1, pages_for(SINKS + WINDOW + 128)), [600], [2], PAGE, SINKS, WINDOW)
    first_shape = shape_of(1, 2, 1, ForwardBatch([KEYS], [(1, window)]), padded=True)
    return partial(run_draft, decoder, kv, DraftInputs(DraftShape(first_shape, DRAFTED, race, 0), META))


def parts(
    shape: ModelShape, dtype: DType = "bfloat16", layers: int = 1, kv_int8: bool = False
) -> tuple[TritonModel, TritonKV]:
    """Return a model of `layers` layers, and memory for all keys."""
    shapes.SHAPES["recorded"] = replace(shape, layers=layers)
    try:
        config = shapes.config_of("recorded", KEYS + 1, kv_int8)
    finally:
        del shapes.SHAPES["recorded"]
    model = TritonModel(config, weights_without_memory(config, dtype), META)
    return model, TritonKV(config, pages_for(KEYS + 1), dtype, META)


def weights_without_memory(config: ModelConfig, dtype: DType) -> Weights:
    """Return weights of a Llama whose numbers are all one zero in memory."""

    def zeros(*shape: int) -> NDArray[Any]:
        return np.broadcast_to(np.zeros((), HOST_TYPES[dtype]), shape)

    sources = [layer_sources(config, LLAMA_NAMES, layer, ALONE) for layer in range(config.layers)]
    layers = tuple(layer_of({field: zeros(*shape) for field, (_, shape, _) in fields.items()}) for fields in sources)
    embedding_VC = zeros(config.vocab_size, config.hidden_size)
    head_VC = embedding_VC if config.tied else zeros(config.vocab_size, config.hidden_size)
    return Weights(embedding_VC, layers, zeros(config.hidden_size), head_VC)


def table(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)


def run(decoder: TritonModel, kv: TritonKV, width: int, batch: ForwardBatch) -> None:
    decoder.forward(torch.zeros(1, width, dtype=torch.int64), kv, batch, None)


def sampling(vocabulary: int) -> None:
    """Run both couplings, over logits of models and over logits after penalties."""
    B = 1
    J = 8
    settings_5B = empty(5, B, dtype=torch.float64)
    integers = empty(B, dtype=torch.int64)
    for dtype in (torch.float32, torch.float64):
        asked = sampler.SamplerInputs(empty(B, J, vocabulary, dtype=dtype), settings_5B, empty(2, B, dtype=torch.int64))
        sampler.by_race(asked, integers, integers)
        tokens_BK = empty(B, J - 1, dtype=torch.int64)
        draft_probs_BKV = empty(B, J - 1, vocabulary, dtype=torch.float64)
        sampler.by_rejection(asked, tokens_BK, draft_probs_BKV, empty(B, J, dtype=torch.float64))
    rng.exponentials(integers, integers, integers, vocabulary)


def multiplying(kind: str) -> None:
    """Run products of Llama-3.1-8B's gate, down and keys: for one token, for a strict pass, and rows as numbers."""
    s, (block, size) = MODELS["Llama-3.1-8B"], GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    keys = s.kv_heads * s.head_dim
    for outputs, inputs in ((s.intermediate, s.hidden), (s.hidden, s.intermediate), (keys, s.hidden)):
        blocks = np.broadcast_to(np.uint8(0), (outputs, inputs // block * size))
        weight = packed(QuantizedWeight(kind, blocks, inputs), META)
        assert isinstance(weight, PackedWeight)
        for tokens in (1, 8 * 32):
            weight_tiles.times(empty(tokens, inputs, dtype=torch.bfloat16), weight)
        weight_tiles.rows_of(weight, empty(1, dtype=torch.int64), torch.bfloat16)


def others() -> None:
    """Run page selection, noise, page copies from the host, and the norm of Qwen3's queries."""
    for pages in (pages_for(KEYS), topk.MAX_CANDIDATES):
        topk.best(empty(8, pages), range(1, pages), BUDGET // PAGE)
    integers = empty(3, dtype=torch.int64)
    rng.uniforms(integers, integers, integers, 0, 9)
    pages = empty(1 << 16, PAGE * 128, dtype=torch.bfloat16)
    page_ids = empty(32 * 32 * 256, dtype=torch.int64)
    copy_pages((pages, pages), page_ids, (pages, pages), page_ids, PAGE * 128)
    coded = empty(1 << 16, PAGE * 130, dtype=torch.int8)
    copy_pages((coded, coded), page_ids, (coded, coded), page_ids, PAGE * 130)
    pointwise.norm(empty(1, 32, 128, dtype=torch.bfloat16), empty(128, dtype=torch.bfloat16), 1e-6)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def planted(fault: str) -> list[Launch]:
    """Return Llama-3.1-8B's verifying pass with a fault: `spill`, too many rows per warp; `misalignment`, of keys."""
    with recorded() as recorder:
        recorder.case = f"planted {fault}"
        target(MODELS["Llama-3.1-8B"], 8)
    return [next(PLANTED[fault](launch) for launch in recorder.launches if launch.kernel.__name__ == "_splits")]


def _spilling(launch: Launch) -> Launch:
    return replace(launch, options=launch.options | {"num_warps": 1})


def _misaligned(launch: Launch) -> Launch:
    """Shift keys by one number, as in a view that begins inside a page."""
    names = [parameter.name for parameter in launch.kernel.params]
    arguments = [*launch.arguments]
    at = names.index("keys")
    arguments[at] = arguments[at].flatten()[1:]
    return replace(launch, arguments=tuple(arguments))


PLANTED: dict[str, Callable[[Launch], Launch]] = {"spill": _spilling, "misalignment": _misaligned}

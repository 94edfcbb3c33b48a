"""Comparisons: `transformers` on the same shape; the shipped pair with real text and acceptance."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch

from benchmarks.on_gpu import ours
from benchmarks.on_gpu.piece import Piece, Row, Setup, speeds
from triforce.backends.cuda import graphs
from triforce.bench import shapes
from triforce.cli.bench.setup import own_texts
from triforce.cli.text_files import BOOK
from triforce.errors import RequestError
from triforce.eval.context import tokenizer_of
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM


def transformers_piece(setup: Setup, shape: str, context: int) -> Piece:
    """`generate` with a static cache, sdpa and a compiled step."""
    run = partial(_or_error, _transformers, setup, shape, context, "static")
    return Piece("transformers generate", shape, context, run)


def offloaded(setup: Setup, shape: str, context: int) -> Iterator[Piece]:
    """`generate` with its offloaded cache, and DeepSpeed's ZeRO-Inference, the paper's baseline."""
    run = partial(_or_error, _transformers, setup, shape, context, "offloaded")
    yield Piece("transformers generate, offloaded cache", shape, context, run)
    yield Piece("DeepSpeed ZeRO-Inference", shape, context, partial(_or_error, _deepspeed, setup, shape, context))


def _or_error(measure: Callable[..., Row], *arguments: Any) -> Row:
    """Record the error of a piece that cannot run here, for want of memory or of a package."""
    try:
        return measure(*arguments)
    except Exception as error:  # whatever other projects raise
        message = f"{type(error).__name__}: {error}"
        return {"seconds": None, "fraction_of_limit": None, "speedup": None, "error": message}


class Clock:
    """A streamer that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(perf_counter())

    def end(self) -> None: ...


def _transformers(setup: Setup, shape: str, context: int, cache: str) -> Row:
    """Seconds a token, once compiled; random weights made on the device, as ours are."""
    model = _random_llama(setup, shape, context, setup.device)
    return _generate(setup, model, context, cache if setup.on_gpu else None)


def _random_llama(setup: Setup, shape: str, context: int, device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    setup.drop_models()  # our weights, which would lie beside theirs
    s = shapes.SHAPES[shape]
    options: dict[str, Any] = {"attn_implementation": "sdpa"}
    config: Any = LlamaConfig(
        vocab_size=s.vocab, hidden_size=s.hidden, intermediate_size=s.intermediate, num_hidden_layers=s.layers,
        num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, head_dim=s.head_dim,
        max_position_embeddings=context + 1024, bos_token_id=1, eos_token_id=None, **options,
        dtype=setup.dtype,
    )  # fmt: skip
    with torch.device(device):
        torch.set_default_dtype(config.dtype)
        try:
            model: Any = LlamaForCausalLM(config)
            return model.eval()
        finally:
            torch.set_default_dtype(torch.float32)


def _generate(setup: Setup, model: Any, context: int, cache: str | None) -> Row:
    clock = Clock()
    vocabulary = model.config.vocab_size
    ids = torch.randint(2, min(1000, vocabulary), (1, context), device=setup.device)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=setup.tokens, do_sample=False, pad_token_id=0,
        cache_implementation=cache, prefill_chunk_size=8192 if setup.on_gpu else None, streamer=clock,
    )  # fmt: skip
    later_ticks = clock.times[len(clock.times) // 2 :]
    return {
        "seconds": (later_ticks[-1] - later_ticks[0]) / (len(later_ticks) - 1),
        "fraction_of_limit": None,
        "speedup": None,
    }


def _deepspeed(setup: Setup, shape: str, context: int) -> Row:
    """Weights on the host, layer by layer, as ZeRO-Inference has them."""
    import deepspeed

    # What its launcher sets.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    how = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}},
    }  # fmt: skip
    model = _random_llama(setup, shape, context, "cpu")
    engine, *_ = deepspeed.initialize(model=model, config=how)
    return _generate(setup, engine.module, context, None)


def shipped_pair(setup: Setup, contexts: list[int]) -> Iterator[Piece]:
    """The pair in src/triforce/assets/pair, on the book it knows nothing of."""
    for context in contexts:
        for temperature in (0.0, 0.6):
            what = f"triforce, temperature {temperature}"
            yield Piece(what, "shipped pair", context, partial(_real, setup, context, temperature), "real")


def _real(setup: Setup, context: int, temperature: float) -> Row:
    """Each text is made twice, and the second time counts: then its graphs have been captured.

    The new tokens are the last ones of the context, which may be all that the pair has.
    """
    llm, read = _opened(setup, context)
    texts = llm.open(1, context)
    turns = []
    for params in _params(setup, temperature, ours.TURNS):
        requests = [llm.request(read, params, mode) for mode in ("ar", "triforce") for _ in range(2)]
        outputs = []
        for request in requests:
            texts.submit([request])
            outputs.append(texts.finish(request))
        turns.append((outputs[1], outputs[3]))
    plain, fast = (
        [output.decode_seconds / setup.tokens for output in mode_outputs] for mode_outputs in zip(*turns, strict=True)
    )
    return speeds(plain, fast) | {
        "fraction_of_limit": None,
        "kept": {tier.name: tier.accepted / max(1, tier.proposed) for tier in turns[0][1].tiers[:-1]},
        "same_text_as_ar": all(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in turns),
    }  # fmt: skip


def wall_clock(setup: Setup, context: int) -> Iterator[Piece]:
    """Measure the same pair in wall-clock seconds, from submitting a text to its end; the first text is separate."""
    for mode in ("auto", "triforce"):
        for temperature in (0.0, 0.6):
            what = f"{mode}, temperature {temperature}, wall clock"
            yield Piece(what, "shipped pair", context, partial(_wall_clock, setup, context, mode, temperature), "real")


@dataclass(frozen=True, slots=True)
class TimedText:
    """Seconds of a text on the wall, the graphs that it captured, and its tokens."""

    seconds: float
    captures: int
    token_ids: list[int]


def _wall_clock(setup: Setup, context: int, mode: str, temperature: float) -> Row:
    """Seconds a token of texts whose prompt has been read, plainly and in a mode, in turns.

    The first text of each compiles kernels, and a text captures passes of shapes that are new.
    """
    llm, read = _opened(setup, context)
    texts = llm.open(1, context)
    texts_of: dict[str, list[TimedText]] = {"ar": [], mode: []}
    for params in (SamplingParams(max_tokens=1), *_params(setup, temperature, 1 + ours.TURNS)):
        for name, timed_texts in texts_of.items():
            request = llm.request(read, params, name)
            graphs_before = graphs.captured_graphs()
            began = perf_counter()
            texts.submit([request])
            output = texts.finish(request)
            seconds = (perf_counter() - began) / params.max_tokens
            timed_texts.append(
                TimedText(seconds, graphs.captured_graphs() - graphs_before, output.outputs[0].token_ids)
            )
    (_, plain_first, *plain), (_, fast_first, *fast) = texts_of.values()  # the very first one reads the prompt
    return speeds([text.seconds for text in plain], [text.seconds for text in fast]) | {
        "fraction_of_limit": None, "first_seconds": fast_first.seconds, "plain_first_seconds": plain_first.seconds,
        "captures": [text.captures for text in texts_of[mode]],
        "plain_captures": [text.captures for text in texts_of["ar"]],
        "same_text_as_ar": [a.token_ids == b.token_ids for a, b in zip(plain, fast, strict=True)],
    }  # fmt: skip


def _opened(setup: Setup, context: int) -> tuple[LLM, list[int]]:
    """Return the shipped pair, and a prompt that leaves room for the new tokens. Raises RequestError."""
    llm = LLM(device=setup.device)
    ids = tokenizer_of(llm).encode(own_texts()[BOOK])
    limit = llm.target.config.context
    if context > min(len(ids), limit):
        raise RequestError(f"the book has {len(ids)} tokens, the pair {limit} positions; --contexts must stay below")
    return llm, ids[: context - setup.tokens]


def _params(setup: Setup, temperature: float, texts: int) -> list[SamplingParams]:
    """Return the sampling parameters of each text: each has a seed of its own."""
    return [
        SamplingParams(temperature, top_p=0.9, seed=seed, max_tokens=setup.tokens, ignore_eos=True)
        for seed in range(texts)
    ]

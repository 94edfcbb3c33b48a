"""What is compared with: `transformers` on the same shape; and the shipped pair with real text and real acceptance."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import resources
from time import perf_counter
from typing import Any

import torch

from benchmarks.on_gpu.piece import Piece, Row, Setup
from triforce.bench import shapes, speed
from triforce.errors import RequestError
from triforce.llm import LLM


def transformers_pieces(setup: Setup, shape: str, context: int) -> Iterator[Piece]:
    """`generate` with a static cache, sdpa and a compiled step."""
    yield Piece("transformers generate", shape, context, "none", partial(_transformers, setup, shape, context))


class Clock:
    """A streamer that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(perf_counter())

    def end(self) -> None: ...


def _transformers(setup: Setup, shape: str, context: int) -> Row:
    """Seconds a token, once compiled; random weights made on the device, as ours are."""
    from transformers import LlamaConfig, LlamaForCausalLM

    s, on_gpu, clock = shapes.SHAPES[shape], setup.device.type == "cuda", Clock()
    config = LlamaConfig(
        vocab_size=s.vocab, hidden_size=s.hidden, intermediate_size=s.intermediate, num_hidden_layers=s.layers,
        num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, head_dim=s.head_dim,
        max_position_embeddings=context + 1024, attn_implementation="sdpa", bos_token_id=1, eos_token_id=None,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
    )  # fmt: skip
    with setup.device:
        torch.set_default_dtype(config.dtype)
        try:
            model = LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)
    ids = torch.randint(2, min(1000, s.vocab), (1, context), device=setup.device)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=setup.tokens, do_sample=False, pad_token_id=0,
        cache_implementation="static" if on_gpu else None, prefill_chunk_size=8192 if on_gpu else None, streamer=clock,
    )  # fmt: skip
    late = clock.times[len(clock.times) // 2 :]
    return {"seconds": (late[-1] - late[0]) / (len(late) - 1), "fraction_of_limit": None, "speedup": None}


def shipped_pair(setup: Setup, contexts: list[int]) -> Iterator[Piece]:
    """The pair in src/triforce/pair, on the book it knows nothing of."""
    for context in contexts:
        for temperature in (0.0, 0.6):
            what = f"triforce, temperature {temperature}"
            yield Piece(what, "shipped pair", context, "real", partial(_real, setup, context, temperature))


def _real(setup: Setup, context: int, temperature: float) -> Row:
    llm = LLM(device=str(setup.device), context=context + 1024)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode((resources.files("triforce") / "data" / "dracula.txt").read_text(encoding="utf-8"))
    if len(ids) < context:
        raise RequestError(f"the book has {len(ids)} tokens; --contexts must stay below")
    plan = speed.Plan([context], [temperature], ["ar", "triforce"], tokens=setup.tokens)
    _, row = speed.rows(llm, ids, plan, lambda: lambda seen, total: None)
    seconds = row["seconds"] / row["tokens"]
    return {
        "seconds": seconds,
        "fraction_of_limit": None,
        **{k: row[k] for k in ("speedup", "spread", "same_text_as_ar")},
    }

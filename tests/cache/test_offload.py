"""KV that lies in a store: the text is that of KV in memory, bit for bit, and what goes wrong costs its request alone."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import save, tiny_model
from tiny_llm import ask, ids

from triforce import kernels
from triforce.cache.store import size_of
from triforce.errors import CacheError, RequestError
from triforce.llm import LLM
from triforce.request import KvBytes, RequestOutput

pytestmark = pytest.mark.skipif(kernels.extension.native is None, reason="a store is for the native kernels")

LONG = 4000
PROMPT = ids(LONG)
MEMORY = "7MiB"
SHAPE = dict(hidden_size=32, intermediate_size=32, head_dim=64, num_attention_heads=4, num_key_value_heads=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose KV of the prompt is three times as large as MEMORY."""
    folder = tmp_path_factory.mktemp("large")
    for name, layers in (("target", 6), ("draft", 1)):
        save(tiny_model(max_position_embeddings=LONG + 200, num_hidden_layers=layers, **SHAPE), folder / name)
    return folder


@cache
def llm(folder: Path, kind: str = "none", memory: str = "auto", **how: Any) -> LLM:
    settings = dict(budget=256, gamma_2=4, full_layers="none") | how
    return LLM(folder / "target", folder / "draft", kv_offload=kind, kv_memory=memory, **settings)


def offloaded(folder: Path, kind: str = "file", **how: Any) -> LLM:
    return llm(folder, kind, MEMORY, **how)


def answer(model: LLM, prompt: list[int] = PROMPT, mode: str = "ar", **changes: Any) -> RequestOutput:
    return model.generate(prompt, ask(max_tokens=12, **changes), mode=mode)[0]


def tokens(model: LLM, *args: Any, **changes: Any) -> list[int]:
    return answer(model, *args, **changes).outputs[0].token_ids


@pytest.mark.parametrize("kind", ["file", "host"])
@pytest.mark.parametrize("mode", ["ar", "triforce", "retrieval", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_kv_in_memory(folder: Path, mode: str, temperature: float, kind: str) -> None:
    found = answer(offloaded(folder, kind), mode=mode, temperature=temperature)
    assert found.outputs[0].token_ids == tokens(llm(folder), temperature=temperature)
    assert found.exactness == "bitwise"
    whole = 2 * 6 * 4 * 64 * 2 * LONG
    assert whole > 3 * size_of(MEMORY) * 0.98
    assert found.kv.device_bytes <= size_of(MEMORY)
    assert (found.kv.file_bytes if kind == "file" else found.kv.host_bytes) >= whole

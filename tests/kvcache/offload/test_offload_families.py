"""Offloaded KV of families: layers with a window stay in memory, and texts equal those of KV in memory bit for bit."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.family_models import family_model
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.slow_parameters import slow
from tests.helpers.thread_ranks import together
from tests.helpers.tiny_checkpoint import save, tiny_model
from tests.helpers.tiny_llm import ask, ids
from triforce.backends import dispatch
from triforce.distributed.group import ALONE, TPGroup
from triforce.errors import CacheError
from triforce.interface.quantities import size_of
from triforce.kvcache import pool
from triforce.llm import LLM

pytestmark = pytest.mark.skipif(dispatch.native is None, reason="a store is for the native kernels")

LAYERS = 6
HEADS = 4
DIM = 64
LONG = 6004
SHAPE = dict(hidden_size=32, intermediate_size=32, head_dim=DIM, num_attention_heads=4, num_key_value_heads=HEADS)
PROMPT = ids(LONG)
FULL = {"gemma-3": 2, "gpt-oss": 3, "gemma-2": 3, "qwen3-moe": 6}
"""Number of layers without a window, by family."""
MEMORY = "10MiB"


@pytest.fixture(autouse=True, scope="module")
def small_slack() -> Any:
    """Shorten windows to some pages, so that most KV belongs to layers without a window."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "SLACK", 40)
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@cache
def llm(home: Path, name: str, kind: str = "none", ranks: TPGroup = ALONE, memory: str = MEMORY, **how: Any) -> LLM:
    if not (home / name).exists():
        model = family_model(name, max_position_embeddings=LONG + 200, num_hidden_layers=LAYERS, **SHAPE)
        for number, layer in enumerate(model.model.layers if name == "gpt-oss" else []):  # they count among many keys
            layer.self_attn.sinks.data = torch.linspace(7, 12, len(layer.self_attn.sinks)).roll(number)
        save(model, home / name)
        save(tiny_model(max_position_embeddings=LONG + 200, num_hidden_layers=1, **SHAPE), home / "draft")
    memory_option = {"kv_memory": memory} if kind != "none" else {}
    settings = dict(retrieval_budget=256, speculative_tokens=4, searched_layers="none") | memory_option | how
    return LLM(home / name, home / "draft", kv_offload=kind, ranks=ranks, **settings)


def answer(model: LLM, prompts: Any = PROMPT, mode: str = "ar", **changes: Any) -> Any:
    return model.generate(prompts, ask(max_tokens=12, **changes), mode=mode)


def tokens(outputs: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("mode", "temperature", "kind"),
    [
        pytest.param("ar", 0.0, "host", marks=pytest.mark.slow),
        pytest.param("ar", 0.8, "file", marks=pytest.mark.slow),
        ("triforce", 0.8, "host"),
        ("retrieval", 0.0, "file"),
        ("auto", 0.8, "file"),
    ],
)
@pytest.mark.parametrize("name", FULL)
def test_offloaded_family_text_equals_memory(home: Path, name: str, mode: str, temperature: float, kind: str) -> None:
    (output,) = answer(llm(home, name, kind), mode=mode, temperature=temperature)
    assert tokens([output]) == tokens(answer(llm(home, name), temperature=temperature))
    assert output.exactness == "bitwise"
    kv_bytes = 2 * FULL[name] * HEADS * DIM * 2 * LONG
    assert output.kv.device_bytes <= size_of(MEMORY)
    assert output.kv.device_bytes < kv_bytes
    assert kv_bytes <= (output.kv.file_bytes if kind == "file" else output.kv.host_bytes) < 1.2 * kv_bytes


@pytest.mark.parametrize("name", ["gemma-3", "gpt-oss"])
def test_offloaded_family_with_int8_kv_equals_memory(home: Path, name: str) -> None:
    offloaded_outputs = answer(llm(home, name, "file", kv_dtype="int8"), mode="triforce", temperature=0.8)
    assert tokens(offloaded_outputs) == tokens(answer(llm(home, name, kv_dtype="int8"), temperature=0.8))


@pytest.mark.parametrize("name", ["gemma-3", "gpt-oss"])
def test_offloaded_family_batch_equals_each_text(home: Path, name: str) -> None:
    prompts = [PROMPT, ids(1100, seed=3), PROMPT[:-30]]
    single_texts = [tokens(answer(llm(home, name), prompt))[0] for prompt in prompts]
    assert tokens(answer(llm(home, name, "file", memory="24MiB"), prompts, mode="retrieval")) == single_texts


def test_second_question_of_offloaded_windows_equals_memory(home: Path) -> None:
    model = llm(home, "gemma-3", "file")
    question = PROMPT[:-20] + ids(15, seed=9)
    answer(model)
    (output,) = answer(model, question, mode="retrieval")
    assert tokens([output]) == tokens(answer(llm(home, "gemma-3"), question)) and output.cached_tokens > LONG - 100


@pytest.mark.parametrize("mode", [*slow("ar"), "triforce"])
@pytest.mark.parametrize("name", ["gemma-3", "gpt-oss"])
def test_ranks_of_offloaded_windows_equal_memory(home: Path, name: str, mode: str) -> None:
    expected_texts = tokens(answer(llm(home, name), temperature=0.8))

    def one(ranks: TPGroup) -> Any:
        return answer(llm.__wrapped__(home, name, "file", ranks, "14MiB"), mode=mode, temperature=0.8)

    assert all(tokens(outputs) == expected_texts for outputs in together(2, one))


def test_cancelled_prompts_leave_memory(home: Path) -> None:
    """Each prompt is cancelled after its first chunk. Its pages stay in the prefix cache, and no row uses them."""
    model = llm.__wrapped__(home, "gemma-3", "file")
    engine = model.open(1, max_itl=0.001)
    for seed in range(8):
        request = model.request(ids(900, seed=20 + seed), ask(max_tokens=4), "ar")
        engine.submit([request])
        assert not [event for _, event in engine.step() if isinstance(event, Exception)]
        engine.cancel(request)
    surviving_request = model.request(PROMPT, ask(max_tokens=12), "ar")
    engine.submit([surviving_request])
    assert tokens([engine.finish(surviving_request)]) == tokens(answer(llm(home, "gemma-3")))
    engine.close()


def test_windows_alone_leave_nothing_to_offload(home: Path) -> None:
    (output,) = answer(llm(home, "mistral-window", "file", memory="1MiB"))
    assert tokens([output]) == tokens(answer(llm(home, "mistral-window"))) and not output.kv.file_bytes


def test_too_little_memory_counts_windows(home: Path) -> None:
    with pytest.raises(CacheError, match="kv_memory is 1MiB, too little for one text"):
        answer(llm(home, "gemma-3", "file", memory="1MiB"))


@pytest.mark.parametrize("mutant", caught_in("test_offload_family_mutant_is_noticed"), ids=str)
def test_offload_family_mutant_is_noticed(home: Path, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(AssertionError):
        for name in ("gpt-oss", "gemma-2"):
            offloaded_outputs = answer(llm.__wrapped__(home, name, "file"), temperature=0.8)
            assert tokens(offloaded_outputs) == tokens(answer(llm(home, name), temperature=0.8))

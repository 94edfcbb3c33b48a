"""Ranks whose KV is in stores of their own give the text of one process with KV in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.mutants.registry import caught_in
from tests.helpers.thread_ranks import together
from tests.helpers.tiny_checkpoint import save, tiny_model
from triforce.backends import dispatch
from triforce.distributed.group import ALONE, TPGroup
from triforce.errors import CacheError
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache.offload_sizing import size_of
from triforce.llm import LLM

pytestmark = pytest.mark.skipif(dispatch.native is None, reason="a store is for the native kernels")
SHAPE = dict(hidden_size=64, intermediate_size=64, head_dim=64, num_attention_heads=4, num_key_value_heads=4)
PROMPTS = [[2 + (7 * i * i + step) % 90 for i in range(1300)] for step in (0, 11)]
MEMORY = "7MiB"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    for name, layers in (("target", 5), ("draft", 1)):
        save(tiny_model(max_position_embeddings=1500, num_hidden_layers=layers, **SHAPE), folder / name)
    return folder


def generate(pair: Path, ranks: TPGroup, mode: str, temperature: float = 0.8, **settings: Any) -> list[RequestOutput]:
    settings = {"retrieval_budget": 256, "searched_layers": "none"} | settings
    llm = LLM(pair / "target", pair / "draft", ranks=ranks, **settings)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=12, ignore_eos=True)
    return llm.generate(PROMPTS, params, mode=mode)


def texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(("temperature", "kind"), [(0.0, "host"), (0.8, "file")])
@pytest.mark.parametrize("mode", ["ar", "triforce", "retrieval", "auto"])
def test_sharded_offloaded_texts_equal_one_process(pair: Path, mode: str, temperature: float, kind: str) -> None:
    one_process = texts(generate(pair, ALONE, "ar", temperature))
    for outputs in together(
        2, lambda ranks: generate(pair, ranks, mode, temperature, kv_offload=kind, kv_memory=MEMORY)
    ):
        assert texts(outputs) == one_process and all(output.exactness == "bitwise" for output in outputs)
        kv = outputs[0].kv
        all_kv_bytes = 2 * 5 * 4 * 64 * 2 * sum(map(len, PROMPTS))
        assert kv.device_bytes <= size_of(MEMORY) < all_kv_bytes / 1.7
        assert (kv.file_bytes if kind == "file" else kv.host_bytes) >= all_kv_bytes


@pytest.mark.parametrize(("mode", "kind"), [("ar", "file"), ("triforce", "host")])
def test_sharded_offloaded_int8_texts_equal_one_process(pair: Path, mode: str, kind: str) -> None:
    one_process = texts(generate(pair, ALONE, "ar", kv_dtype="int8"))
    settings = dict(kv_dtype="int8", kv_offload=kind, kv_memory="4MiB")
    for outputs in together(2, lambda ranks: generate(pair, ranks, mode, **settings)):
        assert texts(outputs) == one_process and all(output.exactness == "bitwise" for output in outputs)
        kv = outputs[0].kv
        assert outputs[0].kv_dtype == "int8" and kv.device_bytes <= size_of("4MiB") < kv.file_bytes + kv.host_bytes


def test_sharded_searched_layers_keep_texts(pair: Path) -> None:
    one_process = texts(generate(pair, ALONE, "ar"))
    options = dict(kv_offload="file", kv_memory="9MiB", searched_layers="1")
    for outputs in together(2, lambda ranks: generate(pair, ranks, "triforce", **options)):
        assert texts(outputs) == one_process


def test_offload_mutant_changes_the_text(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mutant,) = caught_in("test_offload_mutant_changes_the_text")
    mutant.apply(monkeypatch)
    one_process = texts(generate(pair, ALONE, "ar"))
    for outputs in together(2, lambda ranks: generate(pair, ranks, "ar", kv_offload="file", kv_memory=MEMORY)):
        assert texts(outputs) != one_process


def test_offload_too_little_memory_counts_all_ranks(pair: Path) -> None:
    with pytest.raises(CacheError, match=r"give (\d+)MiB or more") as error:
        together(2, lambda ranks: generate(pair, ranks, "ar", kv_offload="file", kv_memory="1MiB"))
    enough = str(error.value).split("give ")[1].split(" or more")[0]
    together(2, lambda ranks: generate(pair, ranks, "ar", kv_offload="file", kv_memory=enough))

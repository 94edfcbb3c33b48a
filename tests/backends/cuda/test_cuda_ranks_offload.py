"""Ranks with KV on the host, on the path of a GPU, give the text of one process with KV in memory.

Kernels are replaced by their references, as the interpreter supports one thread only.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.cuda import torch_kernels
from tests.helpers.cuda.prompts import ids
from tests.helpers.mutants.registry import caught_in
from tests.helpers.thread_ranks import together
from tests.helpers.tiny_checkpoint import save, tiny_model
from triforce.backends import dispatch
from triforce.backends.cuda.graphs import Graphs
from triforce.backends.tensor_parallel import ShardedModel
from triforce.distributed.group import ALONE, TPGroup
from triforce.errors import CacheError
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import Budget, OffloadConfig, offload_sizing, page_store
from triforce.kvcache.offload_sizing import CudaKVSizing, memory_for
from triforce.llm import LLM

PROMPT = ids(300)
GIB = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = dict(vocab_size=40, num_hidden_layers=3, max_position_embeddings=512, head_dim=8)
    return save(tiny_model(**sizes), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_kernels.replace_kernels(monkeypatch)
    without = SimpleNamespace(native=None, requested="", suits_triton=lambda *_: False)
    monkeypatch.setattr("triforce.backends.token_sampler.dispatch", without)


def text(folder: Path, mode: str, ranks: TPGroup = ALONE, **options: Any) -> list[int]:
    llm = LLM(
        folder, ranks=ranks, device="cpu", dtype="float32", retrieval_budget=32, searched_layers="none", **options
    )
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    output = llm.generate([PROMPT], params, mode=mode)[0]
    assert output.kv.host_bytes > 0 or not options
    return output.outputs[0].token_ids


def of_ranks(folder: Path, mode: str, layers: int) -> list[list[int]]:
    options = dict(kv_offload="host", kv_memory="500KiB", kv_resident_layers=layers)
    return together(2, lambda ranks: text(folder, mode, ranks, **options))


@pytest.fixture
def plain_ids(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "native", None)
        patch.setattr(dispatch, "requested", "torch")
        return text(folder, "ar")


@pytest.mark.parametrize(("mode", "layers"), [("ar", 0), ("retrieval", 0), ("retrieval", 1)])
def test_cuda_ranks_offloaded_text_equals_one_process(
    folder: Path, mode: str, layers: int, plain_ids: list[int], as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes that do not stream can be captured."""
    captured: list[type] = []
    run = Graphs.run
    monkeypatch.setattr(
        Graphs, "run", lambda self, replay, call: captured.append(type(call.args[0])) or run(self, replay, call)
    )
    assert of_ranks(folder, mode, layers) == [plain_ids] * 2
    assert {*captured} == ({ShardedModel} if mode == "retrieval" else set())


def test_offload_mutant_of_ranks_changes_the_text(
    folder: Path, plain_ids: list[int], as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mutant,) = caught_in("test_offload_mutant_of_ranks_changes_the_text")
    mutant.apply(monkeypatch)
    assert of_ranks(folder, "ar", 0) != [plain_ids] * 2


def needs(folder: Path, count: int) -> CudaKVSizing:
    config = LLM(folder, device="cpu", dtype="float32").target.config.shard(count)
    return CudaKVSizing(config, 4, 30_000, 1, 30, Budget(48), 0, "cuda", 0)


def test_device_memory_is_counted_per_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserved memory is summed over all devices, in the KV that stays, in messages, and in comparisons."""
    one_rank = needs(folder, 1)
    two = needs(folder, 2)
    kv_bytes = one_rank.offloadable_bytes
    monkeypatch.setattr(offload_sizing, "_free_on", lambda device: one_rank.activation_bytes + kv_bytes // 2)
    assert memory_for(OffloadConfig("host"), one_rank) == int(one_rank.memory_share * one_rank.free_bytes) < kv_bytes
    assert memory_for(OffloadConfig("host"), two) == int(two.memory_share * 2 * two.free_bytes)
    with pytest.raises(CacheError, match="free on 2 devices"):
        two.split(OffloadConfig("host"), two.free_bytes + 1)


def test_host_memory_is_shared_by_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks share the memory that one rank finds free."""
    two = needs(folder, 2)
    monkeypatch.setattr(offload_sizing, "_free_on", lambda device: GIB)
    monkeypatch.setattr(page_store, "free_memory", lambda: int(1.5 * two.store_bytes(0)))
    offload = OffloadConfig("host", memory=2 * two.min_bytes, layers=0)
    with pytest.raises(CacheError, match="a larger kv_memory"):
        together(2, lambda ranks: page_store.plan_offload(offload, two, ranks))

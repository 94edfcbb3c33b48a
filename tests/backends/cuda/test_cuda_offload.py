"""KV on the host, with a GPU's kernels: texts are those of KV in memory, and sizes that do not fit raise errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.cuda import torch_kernels
from tests.helpers.cuda.prompts import ids
from tests.helpers.cuda.scene import DEVICE
from tests.helpers.tiny_checkpoint import save, tiny_model
from triforce.backends import dispatch
from triforce.backends import dispatch as backends_dispatch
from triforce.backends.cuda.offload.kv import TritonOffloadedKV
from triforce.backends.cuda.triton.kv_tiles import copy_pages
from triforce.bench import shapes
from triforce.errors import CacheError, RequestError
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import Budget, OffloadConfig, offload_sizing
from triforce.kvcache.offload_sizing import CudaKVSizing
from triforce.llm import LLM
from triforce.model.config import ModelConfig
from triforce.model.rope import Rope

SIZE = dict(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=512)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save(tiny_model(**SIZE), folder / "target")
    save(tiny_model(**SIZE | {"hidden_size": 16, "head_dim": 8, "num_hidden_layers": 1}), folder / "draft")
    return folder


def answers(
    folder: Path, mode: str, prompts: list[list[int]], temperature: float, tokens: int = 4, **options: Any
) -> list[RequestOutput]:
    settings = dict(dtype="float32", retrieval_budget=32, speculative_tokens=4, searched_layers="none") | options
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=tokens, ignore_eos=True)
    return LLM(folder / "target", folder / "draft", **settings).generate(prompts, params, mode=mode)


def texts(*args: Any, **options: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in answers(*args, **options)]


@pytest.fixture
def plain_texts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[int]]]:
    """Return texts of plain decoding on the torch path, with all KV in memory."""

    def decode(prompts: list[list[int]], temperature: float, tokens: int = 4) -> list[list[int]]:
        with monkeypatch.context() as patch:
            patch.setattr(backends_dispatch, "native", None)
            patch.setattr(backends_dispatch, "requested", "torch")
            return texts(folder, "ar", prompts, temperature, tokens)

    return decode


def host(memory: str, layers: int) -> dict[str, Any]:
    return dict(kv_offload="host", kv_memory=memory, kv_resident_layers=layers)


@pytest.mark.parametrize(
    ("mode", "temperature", "length", "memory", "layers"),
    [
        ("ar", 0.8, 70, "300KiB", 0),
        pytest.param("triforce", 0.8, 300, "700KiB", 1, marks=pytest.mark.slow),
        pytest.param("retrieval", 0.0, 70, "300KiB", 2, marks=pytest.mark.slow),
    ],
)
def test_offloaded_single_text_equals_memory(
    folder: Path, mode: str, temperature: float, length: int, memory: str, layers: int, plain_texts: Any, by_name: None
) -> None:
    """Cases: no resident layer; one, with a prompt that is read layer by layer; all layers."""
    (answer,) = answers(folder, mode, [ids(length)], temperature, **host(memory, layers))
    assert [answer.outputs[0].token_ids] == plain_texts([ids(length)], temperature)
    assert (answer.kv.host_bytes > 0) == (layers < 2) and 0 < answer.kv.device_bytes <= 700 << 10


@pytest.mark.slow
def test_offloaded_batch_rows_equal_memory(folder: Path, plain_texts: Any, by_name: None) -> None:
    prompts = [ids(40), ids(60)[20:]]
    assert texts(folder, "retrieval", prompts, 0.0, 3, **host("300KiB", 1)) == plain_texts(prompts, 0.0, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["ar", "draft", "retrieval", "streaming", "triforce", "ngram", "draft-ngram"])
@pytest.mark.parametrize(("temperature", "layers"), [(0.0, 0), (0.8, 1)])
def test_offloaded_mode_text_equals_memory(
    folder: Path, mode: str, temperature: float, layers: int, plain_texts: Any, by_name: None
) -> None:
    prompts = [ids(30), ids(320)[3:]]
    offloaded_texts = texts(folder, mode, prompts, temperature, 12, **host("1MiB", layers))
    assert offloaded_texts == plain_texts(prompts, temperature, 12)


def test_offload_manager_holds_the_pages(folder: Path, by_name: None) -> None:
    llm = LLM(folder / "target", dtype="float32", **host("500KiB", 1))
    memory = llm.open(1, 200).core.store.pool.kv
    assert isinstance(memory, TritonOffloadedKV) and memory.max_resident_layers == 1
    assert dispatch.identity(llm.models.target.model, memory) == "triton"


def test_page_copies_equal_source() -> None:
    draw = torch.Generator().manual_seed(0)
    source = [torch.randn(9, 24, generator=draw).to(DEVICE) for _ in range(2)]
    triton_pages, torch_pages = ([torch.zeros(7, 24, device=DEVICE) for _ in range(2)] for _ in range(2))
    from_X, to_X = (torch.tensor(places, device=DEVICE) for places in ([8, 0, 3, 5, 1], [1, 6, 0, 2, 5]))
    copy_pages((source[0], source[1]), from_X, (triton_pages[0], triton_pages[1]), to_X, 24)
    torch_kernels.carried((source[0], source[1]), from_X, (torch_pages[0], torch_pages[1]), to_X, 24)
    assert all(torch.equal(a, b) and a[5].any() for a, b in zip(triton_pages, torch_pages, strict=True))


def test_offload_to_file_on_cuda_raises(folder: Path, by_name: None) -> None:
    with pytest.raises(RequestError, match="use kv_offload='host'"):
        answers(folder, "ar", [ids(70)], 0.0, kv_offload="file", kv_memory="300KiB")


def test_offload_without_triton_raises(needs: CudaKVSizing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends_dispatch, "_installed", lambda: False)
    monkeypatch.setattr(backends_dispatch, "requested", "")
    with pytest.raises(RequestError, match="needs Triton"):
        dispatch.require_offload(needs.config, "bfloat16", "cuda", "host")


def test_offload_of_a_family_on_cuda_raises(needs: CudaKVSizing) -> None:
    capped = replace(needs.config, architecture=replace(needs.config.architecture, score_cap=30.0))
    with pytest.raises(RequestError, match="KV of this family cannot be offloaded on a GPU yet; use kv_offload='none'"):
        dispatch.require_offload(capped, "bfloat16", "cuda", "host")


def test_offload_too_little_memory_reports_minimum(folder: Path, by_name: None) -> None:
    with pytest.raises(CacheError, match=r"give [0-9]+[KM]iB or more"):
        answers(folder, "ar", [ids(70)], 0.0, **host("20KiB", 0))
    with pytest.raises(CacheError, match="smaller kv_resident_layers"):
        answers(folder, "ar", [ids(300)], 0.0, **host("300KiB", 1))


GIB = 1 << 30


@pytest.fixture(scope="module")
def needs() -> CudaKVSizing:
    """Return the sizing of Llama-2-7B at 122K tokens on a CUDA device."""
    s = shapes.SHAPES["llama-2-7b-128k"]
    rope = Rope(np.ones(64, np.float32), 1.0)
    heads = s.heads, s.kv_heads, s.head_dim
    config = ModelConfig(s.vocab, s.hidden, s.intermediate, s.layers, *heads, 1e-5, False, context=130_000, rope=rope)
    return CudaKVSizing(config, 2, 7700, 1, 52, Budget(4096), 0, "cuda", 0)


def free(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(offload_sizing, "_free_on", lambda device: int(gib * GIB))


@pytest.mark.parametrize("gib", [9, 12, 24, 40, 58, 70])
def test_offload_parts_sum_to_whole(needs: CudaKVSizing, gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 100)
    frames, buffers, layers = needs.split(OffloadConfig("host"), gib * GIB)
    assert (frames + buffers * needs.buffer_frames) * needs.page_bytes <= gib * GIB
    parts = frames - layers * needs.buffer_frames
    assert parts >= (32 - layers) * needs.partial_layer_frames and (layers == 32) == (gib == 70)
    assert needs.store_bytes(layers) + layers * needs.buffer_frames * needs.page_bytes == needs.store_bytes(0)


def test_offload_too_large_is_predicted_before_loading(needs: CudaKVSizing, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 10)
    with pytest.raises(CacheError, match=r"free on cuda.*give (\S+GiB) or less") as error:
        needs.split(OffloadConfig("host", 12 * GIB), 12 * GIB)
    fits = float(str(error.value).split("; give ")[1].split("GiB")[0])
    assert needs.split(OffloadConfig("host", 1), int((fits - 0.05) * GIB))
    free(monkeypatch, 5)
    with pytest.raises(CacheError, match=r"at least .* smaller context"):
        needs.split(OffloadConfig("host"), int(needs.memory_share * needs.free_bytes))


def test_resident_kv_too_large_is_predicted_before_loading(
    needs: CudaKVSizing, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 70)
    needs.require_all()
    free(monkeypatch, 40)
    with pytest.raises(CacheError, match=r"for (\d+) tokens in all; use kv_offload='host'") as error:
        needs.require_all()
    pages = int(str(error.value).split(" for ")[1].split()[0]) // 16
    assert replace(needs, pages=pages - 300).require_all() is None  # fewer tokens have fewer activations


def test_offload_reported_minimum_suffices(needs: CudaKVSizing, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 100)
    with pytest.raises(CacheError, match=r"give \S+ or more"):
        needs.split(OffloadConfig("host", GIB), GIB)
    assert needs.split(OffloadConfig("host"), needs.min_bytes)[2] == 0
    with pytest.raises(CacheError, match=r"give (\S+)GiB more") as error:
        needs.split(OffloadConfig("host", layers=10), needs.min_bytes)
    missing_gib = float(str(error.value).split("give ")[1].split("GiB")[0])
    assert needs.split(OffloadConfig("host", layers=10), needs.min_bytes + int((missing_gib + 0.1) * GIB))[2] == 10

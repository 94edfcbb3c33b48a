"""The engine on Triton's kernels: texts are those of plain decoding, and those of the torch path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.cuda.prompts import ids
from triforce.backends import dispatch
from triforce.backends import dispatch as backends_dispatch
from triforce.backends.cuda.kv import TritonKV
from triforce.backends.cuda.model import TritonModel
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import PagePool
from triforce.llm import LLM


def texts(folder: Path, mode: str, tokens: int, prompts: list[list[int]], temperature: float) -> list[list[int]]:
    llm = LLM(
        folder / "target",
        folder / "draft",
        dtype="float32",
        retrieval_budget=32,
        speculative_tokens=4,
        searched_layers="none",
    )
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=tokens, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, mode=mode)]


@pytest.fixture
def by_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[int]]]:
    """Return the texts of plain decoding on the torch path."""

    def plain(tokens: int, prompts: list[list[int]], temperature: float) -> list[list[int]]:
        with monkeypatch.context() as patch:
            patch.setattr(backends_dispatch, "native", None)
            patch.setattr(backends_dispatch, "requested", "torch")
            return texts(folder, "ar", tokens, prompts, temperature)

    return plain


@pytest.mark.parametrize(("mode", "temperature"), [("ar", 0.8), ("triforce", 0.8), ("retrieval", 0.0)])
def test_cuda_single_text_equals_torch(
    folder: Path, mode: str, temperature: float, by_torch: Callable[..., list[list[int]]], by_name: None
) -> None:
    """The prompt is longer than the budget, so that the retrieval tier selects."""
    tokens = 4
    assert texts(folder, mode, tokens, [ids(70)], temperature) == by_torch(tokens, [ids(70)], temperature)


@pytest.mark.slow
def test_cuda_batch_rows_equal_torch(folder: Path, by_torch: Callable[..., list[list[int]]], by_name: None) -> None:
    prompts = [ids(40), ids(60)[20:]]
    assert texts(folder, "triforce", 3, prompts, 0.0) == by_torch(3, prompts, 0.0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["ar", "draft", "retrieval", "streaming", "triforce", "ngram", "draft-ngram"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_cuda_mode_text_equals_plain_decoding(
    folder: Path, mode: str, temperature: float, by_torch: Callable[..., list[list[int]]], by_name: None
) -> None:
    prompts = [ids(100), ids(30), ids(90)[3:]]
    assert texts(folder, mode, 12, prompts, temperature) == by_torch(12, prompts, temperature)


def test_cuda_model_and_kv_are_selected(folder: Path, by_name: None) -> None:
    target = LLM(folder / "target", dtype="float32").target.decoder
    pool = PagePool(target.config, 1, 2, target.dtype, target.device)
    assert isinstance(target.model, TritonModel) and isinstance(pool.kv, TritonKV)
    assert dispatch.identity(target.model, pool.kv) == "triton"

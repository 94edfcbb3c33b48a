"""Promises for each family: a row's bits depend on that row alone, and every mode's texts are plain decoding's."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.eagle_pair import random_draft
from tests.helpers.family_models import FAMILY_MODELS, LENGTH, RAGGED, SIZES, family_model, paged_logits, texts
from tests.helpers.slow_parameters import slow
from tests.helpers.tiny_checkpoint import save, tiny_model
from tests.helpers.tiny_llm import GREEDY, MODES, SEEDED, ask, ids
from triforce.backends import dispatch
from triforce.engine.model_loader import load
from triforce.llm import LLM

if dispatch.native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
LENGTHS = (40, 150, 215)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder to which models are written on first use."""
    return tmp_path_factory.mktemp("families")


@cache
def llm(home: Path, name: str, lower_tiers: str = "same", kv_dtype: str = "auto", searched_layers: str = "none") -> LLM:
    if not (home / name).exists():
        save(family_model(name), home / name)
    draft = save(tiny_model(**SIZES | dict(num_hidden_layers=1)), home / "draft")
    return LLM(
        home / name, draft, retrieval_budget=64, speculative_tokens=4, searched_layers=searched_layers,
        lower_tiers=lower_tiers, kv_dtype=kv_dtype,
    )  # fmt: skip


def tokens(model: LLM, prompts: list[list[int]], mode: str) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in model.generate(prompts, ask(), mode=mode)]


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_family_bits_depend_on_the_row_alone(home: Path, name: str) -> None:
    decoder = llm(home, name).target.decoder
    one_by_one = paged_logits(decoder, texts(), [[1, 1]] * LENGTH)
    for pieces in (RAGGED, [[LENGTH, LENGTH]], [[LENGTH, 0], [0, LENGTH]]):
        assert torch.equal(paged_logits(decoder, texts(), pieces), one_by_one)


@pytest.mark.parametrize("sampling", [*slow(GREEDY), SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_family_texts_of_every_mode_equal_plain_decoding(home: Path, name: str, sampling: dict[str, Any]) -> None:
    model = llm(home, name)
    prompts = [ids(length, seed=length) for length in LENGTHS]
    texts_by_mode = {
        mode: [output.outputs[0].token_ids for output in model.generate(prompts, ask(**sampling), mode=mode)]
        for mode in MODES
    }
    assert all(texts_by_mode[mode] == texts_by_mode["ar"] for mode in MODES)
    assert model.generate(prompts[2], ask(**sampling), mode="retrieval")[0].exactness == "bitwise"


@pytest.mark.parametrize("name", ["qwen3-moe", "mistral-window", "granite-biases", "gemma-2", "gpt-oss", "glm-4.5"])
def test_family_texts_with_int8_lower_tiers_equal_plain_decoding(home: Path, name: str) -> None:
    prompts = [ids(length, seed=length) for length in LENGTHS]
    plain, drafted = (
        tokens(llm(home, name, lower), prompts, mode) for lower, mode in (("same", "ar"), ("int8", "triforce"))
    )
    assert drafted == plain


@pytest.mark.parametrize("name", ["qwen3-moe", "mistral-window", "smollm3", "gemma-2", "gpt-oss", "glm-4.5"])
def test_family_texts_with_int8_kv_equal_plain_decoding(home: Path, name: str) -> None:
    model = llm(home, name, kv_dtype="int8")
    prompts = [ids(length, seed=length) for length in LENGTHS]
    single_texts = [tokens(model, [prompt], "ar")[0] for prompt in prompts]
    assert all(tokens(model, prompts, mode) == single_texts for mode in MODES)
    rounded, exact = (
        paged_logits(compared_llm.target.decoder, texts(), [[LENGTH, LENGTH]])
        for compared_llm in (model, llm(home, name))
    )
    assert not torch.equal(rounded, exact), "or KV is not int8"


@pytest.mark.parametrize(("name", "layer"), [("gemma-3", 2), ("olmo-3", 3)])
def test_family_texts_with_all_windowless_layers_read_whole_equal_plain_decoding(
    home: Path, name: str, layer: int
) -> None:
    """The retrieval tier then sees all that the full tier sees, and all its draft tokens are accepted."""
    model = llm(home, name, searched_layers=str(layer))
    prompts = [ids(length, seed=length) for length in LENGTHS]
    assert [n for n, window in enumerate(model.target.config.windows) if not window] == [layer]
    plain = tokens(model, prompts, "ar")
    for mode in ("retrieval", "triforce"):
        outputs = [output.outputs[0] for output in model.generate(prompts, ask(), mode=mode)]
        assert [output.token_ids for output in outputs] == plain
        retrieval = [tier for output in outputs for tier in output.tiers if tier.name == "retrieval"]
        assert all(tier.accepted == tier.proposed > 0 for tier in retrieval) and len(retrieval) == len(prompts)


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen2-upper-windows", "olmo-2", "gemma-3"])
def test_family_texts_with_an_eagle_head_equal_plain_decoding(home: Path, name: str) -> None:
    """Some draft tokens of the head are accepted."""
    folder = save(family_model(name, vocab_size=300), home / f"{name}-300")
    random_draft(home / f"{name}-features", load(folder, device="cpu", dtype="float32"))
    model = LLM(folder, home / f"{name}-features", retrieval_budget=64, speculative_tokens=4)
    prompts = [ids(length, seed=length) for length in LENGTHS]
    plain = tokens(model, prompts, "ar")
    accepted_tokens = 0
    for mode in ("draft", "triforce"):
        outputs = [output.outputs[0] for output in model.generate(prompts, ask(), mode=mode)]
        assert [output.token_ids for output in outputs] == plain
        accepted_tokens += sum(tier.accepted for output in outputs for tier in output.tiers if tier.name == "draft")
    assert accepted_tokens

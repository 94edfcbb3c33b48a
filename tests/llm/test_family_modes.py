"""The promises for each family: a row's bits depend on that row alone, and every mode's texts are plain decoding's."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.family_models import FAMILY_MODELS, LENGTH, RAGGED, SIZES, family_model, paged_logits, texts
from tests.helpers.tiny_checkpoint import save, tiny_model
from tests.helpers.tiny_llm import GREEDY, MODES, SEEDED, ask, ids
from triforce.backends import native_loader
from triforce.llm import LLM

if native_loader.native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
LENGTHS = (40, 150, 215)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are written when they are first asked for."""
    return tmp_path_factory.mktemp("families")


@cache
def llm(home: Path, name: str, lower_tiers: str = "same") -> LLM:
    if not (home / name).exists():
        save(family_model(name), home / name)
    draft = save(tiny_model(**SIZES | dict(num_hidden_layers=1)), home / "draft")
    return LLM(
        home / name, draft, retrieval_budget=64, speculative_tokens=4, searched_layers="none", lower_tiers=lower_tiers
    )


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_family_bits_depend_on_the_row_alone(home: Path, name: str) -> None:
    decoder = llm(home, name).target.decoder
    one_by_one = paged_logits(decoder, texts(), [[1, 1]] * LENGTH)
    for pieces in (RAGGED, [[LENGTH, LENGTH]], [[LENGTH, 0], [0, LENGTH]]):
        assert torch.equal(paged_logits(decoder, texts(), pieces), one_by_one)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_family_texts_of_every_mode_equal_plain_decoding(home: Path, name: str, sampling: dict[str, Any]) -> None:
    model, prompts = llm(home, name), [ids(length, seed=length) for length in LENGTHS]
    found = {
        mode: [each.outputs[0].token_ids for each in model.generate(prompts, ask(**sampling), mode=mode)]
        for mode in MODES
    }
    assert all(found[mode] == found["ar"] for mode in MODES)
    assert model.generate(prompts[2], ask(**sampling), mode="retrieval")[0].exactness == "bitwise"


@pytest.mark.parametrize("name", ["qwen3-moe", "mistral-window", "granite-3"])
def test_family_texts_with_int8_lower_tiers_equal_plain_decoding(home: Path, name: str) -> None:
    prompts = [ids(length, seed=length) for length in LENGTHS]
    plain, other = (
        [each.outputs[0].token_ids for each in llm(home, name, lower).generate(prompts, ask(), mode=mode)]
        for lower, mode in (("same", "ar"), ("int8", "triforce"))
    )
    assert other == plain

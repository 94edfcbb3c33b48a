"""Published models: the counts of weights and KV are those of their files, and of transformers' own modules."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from triforce.checkpoint.hf_config import checked, model_config
from triforce.model.config import ModelConfig

DATA = Path(__file__).parents[2] / "docs" / "data" / "models.toml"
PUBLISHED = tomllib.loads(DATA.read_text(encoding="utf-8"))["models"]
each_model = pytest.mark.parametrize("published", PUBLISHED, ids=[entry["name"] for entry in PUBLISHED])


def ours(published: dict[str, Any]) -> ModelConfig:
    hf = checked({"model_type": published["model_type"], **published["config"]})
    return model_config(hf, vocab_size=hf.vocab_size, context=None)


def theirs(published: dict[str, Any]) -> Any:
    """Return transformers' model of the config, without its numbers."""
    config: Any = transformers.CONFIG_MAPPING[published["model_type"]](**published["config"])
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@each_model
def test_parameters_are_those_of_published_files(published: dict[str, Any]) -> None:
    assert ours(published).parameters == published["parameters"]


@pytest.mark.parametrize(
    "published", [entry for entry in PUBLISHED if "held" in entry], ids=lambda entry: entry["name"]
)
def test_glm_files_hold_what_is_read_and_a_layer_that_drafts(published: dict[str, Any]) -> None:
    """The count is exact: the extra layer has three norms, a projection of twice the width, an embedding and a head."""
    config = ours(published)
    C = config.hidden_size
    V = config.vocab_size
    layer = replace(config, layers=config.layers + 1).parameters - config.parameters
    assert config.parameters + layer + 3 * C + 2 * C * C + 2 * V * C == published["held"]


@each_model
def test_parameters_and_kv_are_those_of_transformers(published: dict[str, Any]) -> None:
    config = ours(published)
    model = theirs(published)
    corrections = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert config.parameters == sum(weight.numel() for weight in (*model.parameters(), *corrections))
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    projected = sum(
        module.out_features for name, module in linear.items() if name.endswith(("q_proj", "k_proj", "v_proj"))
    )
    queries = sum(module.in_features for name, module in linear.items() if name.endswith("o_proj"))
    assert config.kv_size == projected - queries

"""Configs whose layers differ: each layer has the window and the rotation that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoint.test_config_oracle import Values, read_both
from triforce.checkpoint.hf_config import read_config
from triforce.errors import ModelError

LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5}
BY_KIND: dict[str, Values] = {
    "gemma-2": {"model_type": "gemma2"},
    "gemma-3": {"model_type": "gemma3_text", "sliding_window": 512},
    "gemma-3, of old": {
        "model_type": "gemma3_text", "rope_theta": 2e6, "rope_local_base_freq": 20_000.0, "rope_scaling": LINEAR,
        "sliding_window_pattern": 4,
    },
    "gemma-3, new": {
        "model_type": "gemma3_text", "layer_types": ["sliding_attention"] * 8 + ["full_attention"],
        "rope_parameters": {
            "full_attention": {**LINEAR, "rope_theta": 3e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 30_000.0},
        },
    },
    "olmo-3": {"model_type": "olmo3"},
    "olmo-3, of old": {"model_type": "olmo3", "rope_theta": 4e5, "rope_scaling": {**YARN, "rope_theta": 4e5}},
    "gpt-oss": {"model_type": "gpt_oss"},
}  # fmt: skip


@pytest.mark.parametrize("name", BY_KIND)
def test_config_kinds_of_layers_equal_transformers(tmp_path: Path, name: str) -> None:
    """The layers with a window, and the thetas of both kinds, agree."""
    ours, theirs = read_both(tmp_path, BY_KIND[name] | {"num_hidden_layers": 9})
    local = theirs.rope_parameters.get("sliding_attention")
    kinds = ours.architecture.kinds
    slides = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert [kind.window for kind in kinds] == [theirs.sliding_window * slides_here for slides_here in slides]
    assert [kind.rope for kind in kinds] == [int(slides_here and local is not None) for slides_here in slides]
    assert ours.rope_theta == theirs.rope_parameters.get("full_attention", theirs.rope_parameters)["rope_theta"]
    assert ours.local_theta == (local["rope_theta"] if local else None)


def test_config_positions_of_gemma_are_scaled_ones(tmp_path: Path) -> None:
    """The positions of Gemma include its linear factor already."""
    ours, theirs = read_both(tmp_path, BY_KIND["gemma-3, of old"])
    assert ours.positions == theirs.max_position_embeddings


def test_config_local_rotation_that_is_scaled_raises(tmp_path: Path) -> None:
    values = BY_KIND["gemma-3, new"] | {"num_hidden_layers": 9}
    values = values | {"rope_parameters": {"sliding_attention": LINEAR, "full_attention": LINEAR}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"rope_parameters.sliding_attention.rope_type = 'linear' is not supported"):
        read_config(tmp_path)

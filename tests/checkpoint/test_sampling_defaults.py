"""Sampling defaults in a model's files, and the line of `info` about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from tests.helpers.gguf_files import LLAMA, write_gguf
from triforce.checkpoint.model_files import GGUFModel, HFFolder
from triforce.cli.answer_output import defaults
from triforce.errors import ModelError
from triforce.interface.sampling_params import USUAL_IN_CHATS, chat_defaults

USUAL = "in chats temperature 0.8, top_k 40, top_p 0.95, min_p 0.05, the usual values"


def gguf(folder: Path, values: dict[str, Any]) -> GGUFModel:
    tensors = {"output_norm.weight": (GGMLQuantizationType.F32, np.ones(32, np.float32))}
    named = {f"general.sampling.{key}": value for key, value in values.items()}
    return GGUFModel(write_gguf(folder / "model.gguf", LLAMA | named, tensors))


def test_sampling_defaults_of_gguf_without_values_are_usual_in_chats(tmp_path: Path) -> None:
    model = gguf(tmp_path, {})
    assert model.sampling_defaults() == {} and chat_defaults({}) == USUAL_IN_CHATS
    assert defaults(model) == f"temperature 1 by default; {USUAL}"


def test_sampling_defaults_of_gguf_with_values_are_those(tmp_path: Path) -> None:
    model, named = gguf(tmp_path, {"temp": 0.7, "top_k": 20}), {"temperature": 0.7, "top_k": 20}
    assert model.sampling_defaults() == named == chat_defaults(named)
    assert defaults(model) == "temperature 0.7, top_k 20 by default (its metadata)"


def test_sampling_defaults_of_folder_with_penalty_alone_are_usual_in_chats(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.1}')
    assert chat_defaults({"repetition_penalty": 1.1}) == USUAL_IN_CHATS | {"repetition_penalty": 1.1}
    description = defaults(HFFolder(tmp_path))
    assert description.startswith(
        "repetition_penalty 1.1 by default (generation_config.json); in chats temperature 0.8, "
    )


@pytest.mark.parametrize("values", [{"temp": -1.0}, {"top_p": "much"}, {"top_p": 0.0}])
def test_sampling_defaults_of_gguf_out_of_range_are_refused(values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model.gguf: t\w+ must be .*; mend it"):
        gguf(tmp_path, values).sampling_defaults()

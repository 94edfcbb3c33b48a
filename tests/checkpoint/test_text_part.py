"""Gemma 3 with a vision part: logits of texts are transformers' own, and the vision part is skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.helpers.family_models import FAMILY_MODELS, LENGTH, RAGGED, SIZES, paged_logits, texts
from tests.helpers.tiny_checkpoint import SIZES as TINY
from tests.helpers.tiny_checkpoint import edit, save
from triforce.engine.model_loader import load
from triforce.errors import ModelError

IMAGES = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28,
              patch_size=14)  # fmt: skip


def model() -> Any:
    torch.manual_seed(0)
    text = TINY | SIZES | FAMILY_MODELS["gemma-3"][1]
    tokens = dict(image_token_index=96, boi_token_index=95, eoi_token_index=94)
    config = transformers.Gemma3Config(text_config=text, vision_config=IMAGES, mm_tokens_per_image=4, **tokens)
    gemma_model = transformers.Gemma3ForConditionalGeneration(config).eval()
    for weight in gemma_model.parameters():
        weight.data = torch.randn_like(weight) * 0.15
    return gemma_model


@torch.no_grad()
def test_text_part_has_logits_of_transformers(tmp_path: Path) -> None:
    # no token stands for an image
    gemma_model = model()
    ids_BT = texts().clamp_max(93)
    expected_BTV = gemma_model(ids_BT).logits
    folder = save(gemma_model, tmp_path)
    checkpoint = load(folder, device="cpu", dtype="float32", context=LENGTH)
    assert checkpoint.config.windows == [24, 24, 0, 24]
    found_BTV = paged_logits(checkpoint.decoder, ids_BT, RAGGED)
    torch.testing.assert_close(found_BTV, expected_BTV, atol=1e-4, rtol=0)


def test_text_part_faults_are_named_in_the_config(tmp_path: Path) -> None:
    folder = save(model(), tmp_path)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit(folder / "config.json", text_config=text | {"hidden_activation": "relu"})
    with pytest.raises(ModelError, match=r"text_config.hidden_activation = 'relu' is not supported"):
        load(folder, device="cpu")
    edit(folder / "config.json", text_config=[])
    with pytest.raises(ModelError, match=r"text_config = \[\] is not supported \(supported: objects\)"):
        load(folder, device="cpu")

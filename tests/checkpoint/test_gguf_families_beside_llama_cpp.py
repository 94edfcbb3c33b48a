"""GGUF files of families beyond Llama and Qwen: logits near llama.cpp's, from the same file.

The variable LLAMA_CPP_PYTHON names an interpreter with llama-cpp-python.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import llama_oracle
from tests.helpers.family_models import family_model
from tests.helpers.gguf_families import CHANGES, FILES, all_tensors, metadata
from tests.helpers.gguf_files import write_gguf
from tests.helpers.tiny_checkpoint import save
from tests.helpers.tiny_llm import ids
from triforce.engine.model_loader import load
from triforce.eval.scoring import full_view, read

pytestmark = llama_oracle.NEEDED
OWN_WAYS: dict[str, dict[str, Any]] = {
    "gpt-oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1.5e5}},
    "olmo-3": {"layer_types": [*["sliding_attention"] * 3, "full_attention"]},  # llama.cpp supports no other pattern
}
"""Changes to models that llama.cpp computes otherwise than transformers. It leaves windows of Phi-3 out.

In llama.cpp YaRN's bounds are whole channels, of gpt-oss too, and a factor of OLMo 3's file is added to its own.
"""
TEXTS = [ids(60, seed) for seed in range(6)]


@pytest.mark.parametrize("name", [name for name in FILES if name != "phi-3-window"])
def test_family_logits_are_llama_cpps(tmp_path: Path, name: str) -> None:
    """Exceptions are llama.cpp's KV in f16, and other experts chosen because of it."""
    arch, fields_by_key = FILES[name]
    model = family_model(name, vocab_size=300, **CHANGES.get(name, {}) | OWN_WAYS.get(name, {}))
    values = metadata(model.config, arch, fields_by_key)
    values.pop("olmo2.rope.scaling.attn_factor", None)
    file = write_gguf(tmp_path / "model.gguf", values, all_tensors(model, save(model, tmp_path / "hf"), arch))
    decoder = load(file, device="cpu", dtype="float32").decoder
    views = [full_view(decoder, 600) for _ in TEXTS]
    ours = [
        torch.cat(list(read(decoder, *view_and_text)))
        for view_and_text in zip(views, map(torch.tensor, TEXTS), strict=True)
    ]
    pairs = zip(ours, llama_oracle.logits(file, TEXTS), strict=True)
    errors_TV = torch.cat([theirs_TV[:, : ours_TV.shape[1]] - ours_TV for ours_TV, theirs_TV in pairs])
    error_T = errors_TV.square().mean(1).sqrt() / torch.cat(ours).std()
    near_share = (error_T < 0.02).float().mean()
    print(f"{name}: median {error_T.median():.5f}, most {error_T.max():.5f}, {near_share:.0%} near")
    assert error_T.median() < 0.005 and near_share > (0.9 if decoder.config.architecture.experts else 0.99)

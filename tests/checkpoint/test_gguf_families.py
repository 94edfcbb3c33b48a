"""GGUF files of families beyond Llama and Qwen, named as the package of the format does it: the logits of folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.family_models import LENGTH, SIZES, family_model, paged_logits, texts
from tests.helpers.gguf_files import byte_level_values, write_gguf
from tests.helpers.tiny_checkpoint import save
from triforce.engine.model_loader import load

FILES: dict[str, tuple[str, dict[str, str]]] = {
    "granite-3": ("GRANITE", {
        "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
    }),
    "olmo-2": ("OLMO2", {}),
    "smollm3": ("SMOLLM3", {}),
    "qwen3-moe": ("QWEN3MOE", {
        "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    }),
}  # fmt: skip
WOVEN = ("GRANITE", "SMOLLM3")


def tensors(folder: Path, arch: str, layers: int) -> dict[str, Any]:
    """Tensors of a folder by the names of the package, experts stacked, rows as llama.cpp's converter orders them."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], layers)
    found: dict[str, Any] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if ".experts." in name:
            number, after = split(name)
            experts.setdefault(f"{name.partition('.experts.')[0]}.experts.{after}", {})[number] = weight
            continue
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert ours is not None, name
        if arch in WOVEN and ("attn_q." in ours or "attn_k." in ours):
            weight = weight.view(-1, 2, 8, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        found[ours] = weight.numpy()
    for name, of in experts.items():
        ours = names.get_name(name, try_suffixes=(".weight",))
        assert ours is not None, name
        found[ours] = np.stack([of[n].numpy() for n in range(len(of))])
    return found


def split(name: str) -> tuple[int, str]:
    """The number of an expert, and what follows it."""
    number, _, rest = name.partition(".experts.")[2].partition(".")
    return int(number), rest


def metadata(config: Any, arch: str, own: dict[str, str]) -> dict[str, Any]:
    architecture = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[arch]]
    sizes = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": SIZES["head_dim"], "attention.value_length": SIZES["head_dim"],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.dimension_count": SIZES["head_dim"],
        "rope.freq_base": float(config.rope_parameters["rope_theta"]), "vocab_size": 300,
    }  # fmt: skip
    sizes |= {key: getattr(config, field) for key, field in own.items()}
    values = {f"{architecture}.{key}": value for key, value in sizes.items()}
    return byte_level_values() | values | {"general.architecture": architecture}


@pytest.mark.parametrize("name", FILES)
def test_gguf_family_logits_equal_folder(tmp_path: Path, name: str) -> None:
    arch, own = FILES[name]
    model = family_model(name, vocab_size=300, **({} if name != "smollm3" else {"no_rope_layers": None}))
    folder = save(model, tmp_path / "hf")
    file = write_gguf(
        tmp_path / "model.gguf",
        metadata(model.config, arch, own),
        tensors(folder, arch, model.config.num_hidden_layers),
    )
    found, expected = (
        paged_logits(load(path, device="cpu", dtype="float32", context=LENGTH).decoder, texts(), [[LENGTH, LENGTH]])
        for path in (file, folder)
    )
    expected = expected[..., : found.shape[2]]  # the file says which tokens are unused
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    packed = load(file, device="cpu", dtype="bfloat16", context=LENGTH).decoder
    near = paged_logits(packed, texts(), [[LENGTH, LENGTH]])
    assert (near - expected).abs().mean() < 0.05 * expected.std()

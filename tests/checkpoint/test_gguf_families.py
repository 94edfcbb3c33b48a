"""GGUF files of families beyond Llama and Qwen, named as the package of the format does it: the logits of folders."""

from __future__ import annotations

from math import log, sqrt
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
from triforce.checkpoint.gguf_config import PATTERN, read_gguf_config
from triforce.checkpoint.gguf_file import GGUFFile
from triforce.checkpoint.model_files import open_model
from triforce.engine.model_loader import load
from triforce.errors import ModelError

GLM = {
    "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace", "nextn_predict_layers": "num_nextn_predict_layers",
}  # fmt: skip
FILES: dict[str, tuple[str, dict[str, str]]] = {
    "granite-3": ("GRANITE", {
        "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
    }),
    "olmo-2": ("OLMO2", {}),
    "smollm3": ("SMOLLM3", {}),
    "gemma-2": ("GEMMA2", {
        "attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }),
    "gemma-3": ("GEMMA3", {"attention.sliding_window": "sliding_window"}),
    "gpt-oss": ("GPT_OSS", {
        "attention.sliding_window": "sliding_window", "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "intermediate_size",
    }),
    "mixtral": ("LLAMA", {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}),
    "olmo-3": ("OLMO2", {
        "attention.sliding_window": "sliding_window", "attention.sliding_window_pattern": "layer_types",
    }),
    "phi-3": ("PHI3", {}),
    "phi-3-window": ("PHI3", {"attention.sliding_window": "sliding_window"}),
    "phi-4-mini": ("PHI3", {}),
    "glm-4": ("GLM4", {}),
    "glm-4-whole": ("GLM4", {}),
    "glm-4.5": ("GLM4_MOE", GLM),
    "glm-4.5-air": ("GLM4_MOE", GLM),
    "qwen3-moe": ("QWEN3MOE", {
        "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    }),
}  # fmt: skip
WOVEN = ("LLAMA", "GRANITE", "SMOLLM3")
FROM_ONE = ("GEMMA2", "GEMMA3")
"""Their folders have weights of norms that count from 1, and their files the sums."""
CHANGES: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layers": None},
    "gemma-2": {"query_pre_attn_scalar": SIZES["head_dim"]},
    "olmo-3": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    "gemma-3": {"query_pre_attn_scalar": SIZES["head_dim"], "sliding_window_pattern": 6, "num_hidden_layers": 6},
}
"""What a file does not say: there it has one value."""


def tensors(folder: Path, arch: str, layers: int) -> dict[str, Any]:
    """Tensors of a folder by the names of the package, experts stacked, rows as llama.cpp's converter orders them."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], layers)
    found: dict[str, Any] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, weight in apart(load_file(folder / "model.safetensors")).items():
        if ".experts." in name:
            number, after = split(name)
            experts.setdefault(f"{name.partition('.experts.')[0]}.experts.{after}", {})[number] = weight
            continue
        ours = names.get_name(name.replace("correction_bias", "correction.bias"), try_suffixes=(".weight", ".bias"))
        assert ours is not None, name
        ours += ".weight" * name.endswith("sinks")
        if arch in FROM_ONE and "norm" in ours:
            weight = weight + 1
        if arch in WOVEN and ("attn_q." in ours or "attn_k." in ours):
            weight = weight.view(-1, 2, 8, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        found[ours] = weight.numpy()
    for name, of in experts.items():
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert ours is not None, name
        found[ours] = np.stack([of[n].numpy() for n in range(len(of))])
    return found


def apart(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts that lie in one tensor as tensors of their own, gate and up projections too."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        prefix, _, own = name.partition(".mlp.experts.")
        part, _, kind = own.partition("_proj")
        if part not in ("gate_up", "down"):
            found[name] = weight
            continue
        parts, ending = (["gate", "up"] if part == "gate_up" else ["down"]), "bias" if kind else "weight"
        for expert, each in enumerate(weight):
            for turn, of in enumerate(parts):
                rows = (each if kind else each.T)[turn :: len(parts)]
                found[f"{prefix}.mlp.experts.{expert}.{of}_proj.{ending}"] = rows.contiguous()
    return found


def split(name: str) -> tuple[int, str]:
    """The number of an expert, and what follows it."""
    number, _, rest = name.partition(".experts.")[2].partition(".")
    return int(number), rest


def metadata(config: Any, arch: str, own: dict[str, str]) -> dict[str, Any]:
    architecture = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[arch]]
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    rotated = int(SIZES["head_dim"] * rope.get("partial_rotary_factor", 1.0))
    sizes = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": SIZES["head_dim"], "attention.value_length": SIZES["head_dim"],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.dimension_count": rotated,
        "rope.freq_base": float(rope["rope_theta"]), "vocab_size": 300,
    }  # fmt: skip
    if rope["rope_type"] == "longrope":
        ratio, original = (config.max_position_embeddings / 64, 64)
        sizes |= {
            "rope.scaling.original_context_length": original, "attention.sliding_window": 0,
            "rope.scaling.attn_factor": sqrt(1 + log(ratio) / log(original)),
        }  # fmt: skip
    elif rope["rope_type"] != "default":
        sizes |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        sizes |= {"rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
        if arch == "OLMO2":  # whose converter writes what comes to cos and sin in all
            sizes |= {"rope.scaling.attn_factor": 0.1 * log(rope["factor"]) + 1}
    sizes |= {key: getattr(config, field) for key, field in own.items()}
    sizes["block_count"] += sizes.get("nextn_predict_layers", 0)
    sizes |= {"expert_gating_func": 2} if arch == "GLM4_MOE" else {}
    if PATTERN in sizes:
        sizes[PATTERN] = [kind == "sliding_attention" for kind in sizes[PATTERN]]
    values = {f"{architecture}.{key}": value for key, value in sizes.items()}
    return byte_level_values() | values | {"general.architecture": architecture}


LEFT_OUT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "all layers of Gemma see all": (
        "gemma-3", "attention.sliding_window", {"layer_types": ["full_attention"] * 6, "num_hidden_layers": 6},
    ),
    "one of four layers of OLMo sees all": (
        "olmo-3", PATTERN, {"layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    ),
    "scores of Granite are scaled as usual": (
        "granite-3", "attention.scale", {"attention_multiplier": SIZES["head_dim"] ** -0.5},
    ),
}  # fmt: skip
"""A family, a key that its file may lack, and what a config says then."""


@pytest.mark.parametrize("name", FILES)
def test_gguf_family_logits_equal_folder(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, *FILES[name], CHANGES.get(name, {}))


@pytest.mark.parametrize("name", LEFT_OUT)
def test_gguf_without_a_key_means_what_llama_cpp_takes(tmp_path: Path, name: str) -> None:
    family, key, changes = LEFT_OUT[name]
    arch, own = FILES[family]
    left = {each: field for each, field in own.items() if each != key}
    check(tmp_path, family, arch, left, CHANGES.get(family, {}) | changes)


def test_gguf_of_granite_without_rotations_is_refused(tmp_path: Path) -> None:
    values = metadata(family_model("granite-3", vocab_size=300).config, *FILES["granite-3"])
    values |= {"granite.rope.scaling.finetuned": False}
    ends = {name: np.zeros((300, 64), np.float32) for name in ("token_embd.weight", "output.weight")}
    with pytest.raises(ModelError, match=r"rope\.scaling\.finetuned = False"):
        read_gguf_config(GGUFFile(write_gguf(tmp_path / "x.gguf", values, ends)))


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [("expert_gating_func", 1, "expert_gating_func = 1"), ("nextn_predict_layers", 5, "nextn_predict_layers = 5")],
)
def test_gguf_of_another_router_is_refused(tmp_path: Path, key: str, value: int, told: str) -> None:
    values = metadata(family_model("glm-4.5", vocab_size=300).config, *FILES["glm-4.5"]) | {f"glm4moe.{key}": value}
    ends = {name: np.zeros((300, 64), np.float32) for name in ("token_embd.weight", "output.weight")}
    with pytest.raises(ModelError, match=told):
        read_gguf_config(GGUFFile(write_gguf(tmp_path / "x.gguf", values, ends)))


def test_gguf_router_of_few_bits_is_read_as_numbers(tmp_path: Path) -> None:
    """It is computed in float32, whatever the file has it in."""
    model, (arch, own) = family_model("qwen3-moe", vocab_size=300), FILES["qwen3-moe"]
    whole = tensors(save(model, tmp_path / "hf"), arch, model.config.num_hidden_layers)
    routers = [name for name in whole if "ffn_gate_inp" in name]
    whole |= {name: (gguf.GGMLQuantizationType.Q8_0, whole[name]) for name in routers}
    file = write_gguf(tmp_path / "model.gguf", metadata(model.config, arch, own), whole)
    archives = open_model(file).archives(packed=True)
    given = {name: archives[name].view(name) for name in archives if name.endswith("mlp.gate.weight")}
    assert len(routers) == len(given) == model.config.num_hidden_layers
    for name, router in given.items():
        assert isinstance(router, Tensor)
        torch.testing.assert_close(router, model.state_dict()[name], atol=2e-2, rtol=0)


def check(tmp_path: Path, name: str, arch: str, own: dict[str, str], changes: dict[str, Any]) -> None:
    """A file has the logits of a folder. own: its keys, by the fields of a config."""
    model = family_model(name, vocab_size=300, **changes)
    folder = save(model, tmp_path / "hf")
    rope, whole = model.config.rope_parameters, tensors(folder, arch, model.config.num_hidden_layers)
    for factors in ("long", "short") if rope.get("rope_type") == "longrope" else ():
        whole[f"rope_factors_{factors}.weight"] = np.array(rope[f"{factors}_factor"], np.float32)
    weights = sum(each.nbytes for each in whole.values())
    if "nextn_predict_layers" in own:
        whole |= {
            name: np.ones((300, 64), np.float32) for name in ("blk.4.nextn.eh_proj.weight", "blk.4.attn_q.weight")
        }
    file = write_gguf(tmp_path / "model.gguf", metadata(model.config, arch, own), whole)
    assert open_model(file).weight_bytes == weights, "of layers that are computed"
    found, expected = (
        paged_logits(load(path, device="cpu", dtype="float32", context=LENGTH).decoder, texts(), [[LENGTH, LENGTH]])
        for path in (file, folder)
    )
    expected = expected[..., : found.shape[2]]  # the file says which tokens are unused
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)  # numbers of a file are float32, and its factors
    packed = load(file, device="cpu", dtype="bfloat16", context=LENGTH).decoder
    near = paged_logits(packed, texts(), [[LENGTH, LENGTH]])
    assert (near - expected).abs().mean() < 0.06 * expected.std()

"""GGUF files of families beyond Llama and Qwen: small random models, with names as in the format's package."""

from __future__ import annotations

from math import log, sqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.family_models import SIZES
from tests.helpers.gguf_files import byte_level_values
from triforce.checkpoint.gguf.config import PATTERN

GLM = {
    "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace", "nextn_predict_layers": "num_nextn_predict_layers",
}  # fmt: skip
GRANITE = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
FILES: dict[str, tuple[str, dict[str, str]]] = {
    "granite-3": ("GRANITE", GRANITE),
    "granite-biases": ("GRANITE", GRANITE),
    "llama-biases": ("LLAMA", {}),
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
"""Families whose folders store norm weights minus 1, and whose files store the sums."""
CHANGES: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layers": None},
    "gemma-2": {"query_pre_attn_scalar": SIZES["head_dim"]},
    "olmo-3": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    "gemma-3": {"query_pre_attn_scalar": SIZES["head_dim"], "sliding_window_pattern": 6, "num_hidden_layers": 6},
}
"""Fields that a file lacks, because they have one value in its family."""


def tensors(folder: Path, arch: str, layers: int) -> dict[str, Any]:
    """Return a folder's tensors by the package's names, experts stacked, rows as llama.cpp's converter orders them."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], layers)
    arrays: dict[str, Any] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, weight in apart(load_file(folder / "model.safetensors")).items():
        if ".experts." in name:
            number, suffix = split(name)
            experts.setdefault(f"{name.partition('.experts.')[0]}.experts.{suffix}", {})[number] = weight
            continue
        ours = names.get_name(name.replace("correction_bias", "correction.bias"), try_suffixes=(".weight", ".bias"))
        assert ours is not None, name
        ours += ".weight" * name.endswith("sinks")
        if arch in FROM_ONE and "norm" in ours:
            weight = weight + 1
        if arch in WOVEN and ("attn_q." in ours or "attn_k." in ours):
            weight = weight.view(-1, 2, 8, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
        arrays[ours] = weight.numpy()
    for name, of in experts.items():
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert ours is not None, name
        arrays[ours] = np.stack([of[n].numpy() for n in range(len(of))])
    return arrays


def apart(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split fused experts into tensors of their own, gate and up projections too."""
    separate: dict[str, Tensor] = {}
    for name, weight in weights.items():
        prefix, _, expert_name = name.partition(".mlp.experts.")
        part, _, kind = expert_name.partition("_proj")
        if part not in ("gate_up", "down"):
            separate[name] = weight
            continue
        parts = ["gate", "up"] if part == "gate_up" else ["down"]
        ending = "bias" if kind else "weight"
        for expert, expert_weight in enumerate(weight):
            for turn, of in enumerate(parts):
                rows = (expert_weight if kind else expert_weight.T)[turn :: len(parts)]
                separate[f"{prefix}.mlp.experts.{expert}.{of}_proj.{ending}"] = rows.contiguous()
    return separate


def split(name: str) -> tuple[int, str]:
    """Return the number of an expert, and the rest of the name."""
    number, _, suffix = name.partition(".experts.")[2].partition(".")
    return int(number), suffix


def metadata(config: Any, arch: str, field_names: dict[str, str]) -> dict[str, Any]:
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
        ratio = config.max_position_embeddings / 64
        original = 64
        sizes |= {
            "rope.scaling.original_context_length": original, "attention.sliding_window": 0,
            "rope.scaling.attn_factor": sqrt(1 + log(ratio) / log(original)),
        }  # fmt: skip
    elif rope["rope_type"] != "default":
        sizes |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        sizes |= {"rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
        if arch == "OLMO2":  # the converter writes the total factor of cos and sin
            sizes |= {"rope.scaling.attn_factor": 0.1 * log(rope["factor"]) + 1}
    sizes |= {key: getattr(config, field) for key, field in field_names.items()}
    sizes["block_count"] += sizes.get("nextn_predict_layers", 0)
    sizes |= {"expert_gating_func": 2} if arch == "GLM4_MOE" else {}
    if PATTERN in sizes:
        sizes[PATTERN] = [kind == "sliding_attention" for kind in sizes[PATTERN]]
    values = {f"{architecture}.{key}": value for key, value in sizes.items()}
    return byte_level_values() | values | {"general.architecture": architecture}


def all_tensors(model: Any, folder: Path, arch: str) -> dict[str, Any]:
    """Return the tensors of a model's folder, and the factors of its long and short rotations."""
    rope = model.config.rope_parameters
    arrays = tensors(folder, arch, model.config.num_hidden_layers)
    for factors in ("long", "short") if rope.get("rope_type") == "longrope" else ():
        arrays[f"rope_factors_{factors}.weight"] = np.array(rope[f"{factors}_factor"], np.float32)
    return arrays

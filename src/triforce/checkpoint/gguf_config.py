"""Metadata of GGUF files as the configs of Hugging Face's models. An unsupported one is refused by the name of its key.

Keys that are neither read here nor known to change nothing are refused: a file that needs them would be computed wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triforce.checkpoint.gguf_file import GGUFFile
from triforce.checkpoint.hf_config import HFConfig, read_local_theta, read_window, with_windows
from triforce.checkpoint.json_fields import MOST_LAYERS, Fields
from triforce.checkpoint.model_families import FAMILIES
from triforce.checkpoint.rope_scaling import Linear, Scaling, Unscaled, Yarn, wavelengths
from triforce.errors import ModelError

ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "granite": "granite", "olmo2": "olmo2",
    "smollm3": "smollm3", "qwen3moe": "qwen3_moe", "gemma2": "gemma2", "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
}  # fmt: skip
"""The family of each architecture that a file may name."""
_GEMMA = {
    "attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "rope.freq_base_swa": "rope_local_base_freq",
}  # fmt: skip
FIELDS: dict[str, dict[str, str]] = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gpt-oss": {
        "attention.sliding_window": "sliding_window", "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "intermediate_size",
    },
    "granite": {
        "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
    },
    "qwen3moe": {
        "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
}  # fmt: skip
"""Keys that only some architectures have, and the fields of a config.json with the same values."""
ALWAYS: dict[str, dict[str, object]] = {"qwen3moe": {"norm_topk_prob": True}}
"""Fields that have one value in all files of an architecture."""
LARGEST_GEMMAS = (46, 62)
"""Layers of the 27B models, whose queries are scaled by the hidden size over the heads: files do not say."""
EMBEDDING, HEAD, FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
TOKENS = "tokenizer.ggml.tokens"

READ = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
})  # fmt: skip
IDLE = frozenset({"rope.scaling.finetuned", "tensor_data_layout"})
"""Keys that change nothing."""
ACCEPTED: dict[str, tuple[object, ...]] = {
    "expert_count": (0,), "expert_used_count": (0,), "attention.sliding_window": (0,), "attention.causal": (True,),
    "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,), "use_parallel_residual": (False,),
    "logit_scale": (0, 1), "residual_scale": (0, 1), "embedding_scale": (0, 1), "attention.scale": (0,),
    "attn_logit_softcapping": (0,), "final_logit_softcapping": (0,), "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,), "rope.scaling.yarn_log_multiplier": (0,), "rope.scaling.alpha": (0,),
    "pooling_type": (0,),
}  # fmt: skip
"""Keys that would change what is computed, and their values that do not. Any other key is refused."""


@dataclass(frozen=True, slots=True)
class Divided(Scaling):
    """A divisor for each frequency, as GGUF files store what Llama 3 did to them (`rope_freqs.weight`)."""

    divisors: tuple[float, ...]

    def frequencies(self, theta: float, D: int, context: int) -> tuple[Tensor, float]:
        return 1.0 / wavelengths(theta, D) / torch.tensor(self.divisors, dtype=torch.float32), 1.0


def read_gguf_config(file: GGUFFile) -> HFConfig:
    """The checked config of a GGUF file. Raises ModelError naming the key that is wrong or not supported."""
    general = _under("general", file)
    general.require("type", ("model",))
    architecture = general.get("architecture")
    if architecture not in ARCHITECTURES:
        raise general.refusal("architecture", ARCHITECTURES)
    config, own = _under(architecture, file), FIELDS.get(architecture, {})
    for key in config:
        if key not in READ | IDLE | own.keys():
            config.require(key, ACCEPTED.get(key, ()))
    hidden, heads = config.whole("embedding_length"), config.whole("attention.head_count")
    kv_heads = config.whole("attention.head_count_kv", heads)
    head_dim = config.whole("attention.key_length", hidden // heads)
    if heads % kv_heads:
        raise config.refusal("attention.head_count_kv", [f"divisors of {heads}"])
    if head_dim % 2 or head_dim < 4:
        raise config.refusal("attention.key_length", ["even numbers from 4"])
    for key in ("attention.value_length", "rope.dimension_count"):
        config.require(key, (head_dim,))
    positions, theta = config.whole("context_length"), config.number("rope.freq_base", 10_000.0, least=2.0)
    family = FAMILIES[ARCHITECTURES[architecture]]
    layers = config.whole("block_count", most=MOST_LAYERS)
    given = {
        "hidden_size": hidden, "num_attention_heads": heads, "head_dim": head_dim, "num_hidden_layers": layers,
        "query_pre_attn_scalar": hidden // heads if layers in LARGEST_GEMMAS else head_dim,
        **ALWAYS.get(architecture, {}), **_left_out(architecture, config, layers, head_dim),
        **{field: config.get(key) for key, field in own.items() if key in config},
    }  # fmt: skip
    fields = Fields({**family.defaults, **given}, str(file.path))
    return HFConfig(
        model_type=ARCHITECTURES[architecture],
        vocab_size=_vocabulary(config, file, hidden),
        hidden_size=hidden,
        intermediate_size=fields.whole(family.inner) if family.inner in given else config.whole("feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("attention.layer_norm_rms_epsilon", least=1e-12, most=1.0),
        tie_word_embeddings=HEAD not in file.tensors,
        max_position_embeddings=positions,
        sliding_window=read_window(fields, family),
        rope_theta=theta,
        scaling=_scaling(config, file, head_dim, positions, fields.within("rope_parameters").flag("truncate", True)),
        architecture=replace(with_windows(fields, family), norm_offset=0.0),  # files have the sum
        local_theta=read_local_theta(fields, family),
    )


def _left_out(architecture: str, config: Fields, layers: int, head_dim: int) -> dict[str, object]:
    """Return fields of keys that a file leaves out, as llama.cpp takes them where a config.json means another value."""
    if architecture == "granite":
        config.require("rope.scaling.finetuned", (True,))  # without, positions are not rotated at all
        return {"attention_multiplier": head_dim**-0.5}
    if architecture == "gemma3" and config.get("attention.sliding_window") is None:
        return {"layer_types": ["full_attention"] * layers}
    return {}


def _under(name: str, file: GGUFFile) -> Fields:
    """The keys that begin with a name, without it."""
    prefix, given = f"{name}.", file.metadata
    return Fields({key.removeprefix(prefix): _plain(given[key]) for key in given if key.startswith(prefix)},
                  str(file.path), prefix)  # fmt: skip


def _plain(value: Any) -> Any:
    """Return what a list has in all its places, as files may give a number for each layer; otherwise a text about it.

    Everything else is returned as it is, but for the ends of long texts, which messages need not show.
    """
    items = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(items, list):
        return f"{value[:40]}..." if isinstance(value, str) and len(value) > 40 else value
    distinct = list(dict.fromkeys(items))
    return distinct[0] if len(distinct) == 1 else f"a list of {len(distinct)} different values"


def _vocabulary(config: Fields, file: GGUFFile, hidden: int) -> int:
    tokens, embedding = file.metadata.get(TOKENS), file.tensors.get(EMBEDDING)
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{file.path}: {TOKENS} is no list of texts; download another file of this model")
    if embedding is None:
        raise ModelError(f"{file.path} lacks the tensor {EMBEDDING}; download a file with the model's weights")
    if embedding.shape != (len(tokens), hidden):
        raise ModelError(
            f"{file.path}: tensor {EMBEDDING} has shape {list(embedding.shape)}, but {TOKENS} and embedding_length ask "
            f"for {[len(tokens), hidden]}; download it again"
        )
    config.require("vocab_size", (len(tokens),))
    return len(tokens)


def _scaling(config: Fields, file: GGUFFile, D: int, positions: int, whole: bool) -> Scaling:
    """The scaling of positions. A file that names no type has a linear one, by 1 where it has no factor.

    whole: as in `Yarn`; it is the family's.
    """
    config.require("rope.scaling.type", ("none", "linear", "yarn"))
    kind = config.get("rope.scaling.type") or "linear"
    name = "rope.scale_linear" if config.get("rope.scaling.factor") is None else "rope.scaling.factor"
    factor = 1.0 if kind == "none" or config.get(name) == 0 else config.number(name, 1.0)
    if kind != "yarn":
        config.require("rope.scaling.attn_factor", (1,))
    if FACTORS in file.tensors:
        if kind == "yarn" or factor != 1:
            raise config.refusal(name, [f"1 beside the tensor {FACTORS}"])
        return Divided(_divisors(file, D))
    if kind != "yarn":
        return Unscaled() if factor == 1 else Linear(factor)
    original = config.whole("rope.scaling.original_context_length", positions, least=2)
    fast = config.number("rope.scaling.yarn_beta_fast", 32.0, least=1e-3)
    slow = config.number("rope.scaling.yarn_beta_slow", 1.0, least=1e-3)
    temper = config.number("rope.scaling.attn_factor", 1.0, least=1e-3)
    return Yarn(factor, original, fast, slow, (0.1 * log(factor) + 1.0) * temper, whole)


def _divisors(file: GGUFFile, D: int) -> tuple[float, ...]:
    tensor = file.tensors[FACTORS]
    if (tensor.type, tensor.shape) != ("F32", (D // 2,)):
        raise ModelError(
            f"{file.path}: tensor {FACTORS} is {tensor.type} {list(tensor.shape)}, and not F32 [{D // 2}]; "
            "download it again"
        )
    values = file.raw(FACTORS).view("<f4")[0]
    if not (np.isfinite(values) & (values > 0)).all():
        raise ModelError(f"{file.path}: tensor {FACTORS} has values that divide nothing; download it again")
    return tuple(values.tolist())

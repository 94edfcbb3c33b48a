"""A Llama of Hugging Face as a GGUF file: matrices in f16, norms in f32. Written from the format's documentation.

Weights of queries and keys are reordered, as this format rotates neighbours and not halves of a head.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_of(task: dict[str, Any]) -> Path:
    """The file of a worker's model: itself, or made of its folder. Raises ValueError for another architecture."""
    model = Path(task["model"])
    return model if model.is_file() else converted(task["model"], task["work"])


def converted(folder: str, work: str) -> Path:
    """The file, made in `work` if it is not there yet. Raises ValueError for another architecture."""
    import gguf

    source = Path(folder)
    file = Path(work) / "model.gguf"
    if file.exists():
        return file
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config["architectures"] != ["LlamaForCausalLM"]:
        raise ValueError(f"{config['architectures'][0]} is not converted here; only LlamaForCausalLM is")
    partial = file.with_suffix(".partial")
    writer = gguf.GGUFWriter(str(partial), "llama")
    _describe(writer, config)
    _name_tokens(writer, source, config)
    for name, weight in _weights(source):
        writer.add_tensor(*_tensor(name, weight, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(file)
    return file


def _describe(writer: Any, config: dict[str, Any]) -> None:
    import gguf

    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10_000.0)}
    size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name("model")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(size)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    if rope.get("rope_type", "default") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _name_tokens(writer: Any, source: Path, config: dict[str, Any]) -> None:
    import gguf

    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {i: text for text, i in tokenizer["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    names = [special.get(i) or ids.get(i) or f"[unused {i}]" for i in range(config["vocab_size"])]
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(names))]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config.get("bos_token_id") or 0)
    end = config.get("eos_token_id") or 0
    writer.add_eos_token_id(end if isinstance(end, int) else end[0])
    writer.add_add_bos_token(False)


def _weights(source: Path) -> Any:
    from safetensors import safe_open

    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  it is no dictionary
                yield name, tensors.get_tensor(name).float().numpy()


def _tensor(name: str, weight: Any, config: dict[str, Any]) -> tuple[str, Any]:
    import numpy as np

    stem = name.removesuffix(".weight")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(stem[-6:])
    if heads:
        size = len(weight) // heads
        weight = weight.reshape(heads, 2, size // 2, -1).swapaxes(1, 2).reshape(weight.shape)
    if stem in OUTER:
        named = OUTER[stem]
    else:
        _, _, layer, part = stem.split(".", 3)
        named = f"blk.{layer}.{LAYER[part]}"
    return f"{named}.weight", weight.astype(np.float16 if weight.ndim > 1 else np.float32)

"""Tiny random checkpoints of Llama without torch and transformers, for `make test-core`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from triforce.checkpoint.safetensors_file import serialized

DEFAULTS: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", rms_norm_eps=1e-6, rope_theta=10000.0,
    tie_word_embeddings=False, attention_bias=False, mlp_bias=False, bos_token_id=1, eos_token_id=2, dtype="float32",
)  # fmt: skip


class RandomLlama:
    """A Llama model with all weights (norms too) far from neutral values, float32. sizes: fields of its config."""

    def __init__(self, **sizes: Any) -> None:
        self.config = DEFAULTS | sizes

    def save_pretrained(self, folder: Path) -> None:
        """Write config.json and model.safetensors."""
        folder.mkdir(parents=True, exist_ok=True)
        draw = np.random.default_rng(0)
        arrays = {
            name: ((1.0 if "norm" in name else 0.0) + 0.15 * draw.standard_normal(shape)).astype(np.float32)
            for name, shape in self._shapes().items()
        }
        (folder / "config.json").write_text(json.dumps(self.config))
        (folder / "model.safetensors").write_bytes(serialized(arrays))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        config = self.config
        hidden = config["hidden_size"]
        inner = config["intermediate_size"]
        head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
        queries = config["num_attention_heads"] * head_dim
        keys = config["num_key_value_heads"] * head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
        for layer in range(config["num_hidden_layers"]):
            parts = {
                "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
                "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
                "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            }  # fmt: skip
            shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not config["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (config["vocab_size"], hidden)
        return shapes


class CoreTokenizer:
    """A tokenizer as its tokenizer.json, and the fields of its tokenizer_config.json."""

    def __init__(self, core: tokenizers.Tokenizer, **fields: Any) -> None:
        self.backend_tokenizer = core
        self.fields = fields

    def save_pretrained(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        folder.mkdir(parents=True, exist_ok=True)
        self.backend_tokenizer.save(str(folder / "tokenizer.json"))
        fields = self.fields | {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(fields))

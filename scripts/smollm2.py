"""Writes SmolLM2-135M-Instruct as a bfloat16 model folder, and its GGUF file beside it: python -m scripts.smollm2 OUT.

The file is the one behind MODEL `smollm2`. Its weights are dequantised, and rows of q and k are moved from llama.cpp's
order (pairs of features beside each other) to Hugging Face's. Exit code 3: the file cannot be downloaded; 1: another
error, such as a wrong hash.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file

from benchmarks.compare.gguf_file import LAYER, OUTER
from benchmarks.compare.hf_folder import write_tokenizer
from triforce.checkpoint.model_sources import SMOLLM2, UnavailableModel, find
from triforce.errors import ModelError

UNAVAILABLE = 3
NAMES = {gguf_name: name for name, gguf_name in OUTER.items()}
"""Hugging Face's names of tensors outside of layers, by their names in the file."""
IN_BLOCK = {gguf_name: name for name, gguf_name in LAYER.items()}
"""Hugging Face's names of tensors in a layer, by their names in the file."""


def main(out: Path) -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("triforce.models").setLevel(logging.INFO)
    try:
        model_file = find(SMOLLM2)
    except ModelError as error:
        print(error, file=sys.stderr)
        sys.exit(UNAVAILABLE if isinstance(error, UnavailableModel) else 1)
    out.mkdir(parents=True, exist_ok=True)
    file = out / SMOLLM2.file
    if not (file.exists() and file.samefile(model_file)):
        shutil.copyfile(model_file, file)
    reader = GGUFReader(file)
    config = config_of({name: field.contents() for name, field in reader.fields.items()})
    write_tokenizer(file, out)
    numbers = (tensor(reader_tensor, config) for reader_tensor in reader.tensors)
    save_file({name: values.bfloat16() for name, values in numbers}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config, indent=2))  # last: a folder with config.json is complete


def config_of(fields: dict[str, Any]) -> dict[str, Any]:
    heads = int(fields["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": int(fields["llama.embedding_length"]),
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": int(fields["llama.embedding_length"]) // heads,
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rms_norm_eps": round(float(fields["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
    }


def tensor(packed: Any, config: dict[str, Any]) -> tuple[str, torch.Tensor]:
    """Return a tensor's name and its float32 numbers, as Hugging Face's folders have them."""
    stem = packed.name.removesuffix(".weight")
    values = torch.from_numpy(np.array(dequantize(packed.data, packed.tensor_type), np.float32))
    if stem in NAMES:
        return f"{NAMES[stem]}.weight", values
    _, block, part = stem.split(".")
    if part in ("attn_q", "attn_k"):
        pairs = values.view(-1, config["head_dim"] // 2, 2, values.shape[1])
        values = pairs.transpose(1, 2).reshape(values.shape).contiguous()
    return f"model.layers.{block}.{IN_BLOCK[part]}.weight", values


if __name__ == "__main__":
    main(Path(sys.argv[1]))

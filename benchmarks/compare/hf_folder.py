"""A GGUF file as a folder of Hugging Face's kind, for engines that read nothing else: weights become numbers again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from triforce.backends.torch.tensors import tensor_of
from triforce.checkpoint.gguf.config import Divided
from triforce.checkpoint.gguf.file import GGUFFile
from triforce.checkpoint.gguf.tokenizer import read_gguf_tokenizer
from triforce.checkpoint.hf_config import HFConfig
from triforce.checkpoint.model_files import GGUFModel
from triforce.checkpoint.rope_scaling import Linear, Llama3, Scaling, Unscaled, Yarn
from triforce.errors import ModelError

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SHARD = 1 << 30
"""Bytes of weights in a file, and so in memory at a time."""

LLAMA3 = Llama3(factor=0.0, original_positions=8192, low_turns=1.0, high_turns=4.0)
"""What Llama 3.1 and 3.2 have; but for the factor; their files tell the divisors alone."""


def bits_per_weight(path: Path) -> float:
    """Return how many bits the weights of a file have in the mean. Raises ModelError."""
    tensors = GGUFFile(path).tensors.values()
    return 8 * sum(tensor.size for tensor in tensors) / sum(prod(tensor.shape) for tensor in tensors)


def unpacked(path: Path, folder: Path) -> Path:
    """The folder with the numbers of a file in float16, made if it is not there yet. Raises ModelError."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    model = GGUFModel(path)
    config = config_of(model.config)
    write_tokenizer(path, folder)
    names: dict[str, str] = {}
    for number, tensors in enumerate(_shards(model)):
        file = f"model-{number}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def write_tokenizer(path: Path, folder: Path) -> None:
    """Write the tokenizer of a file as it is read here: conversions elsewhere cut some texts otherwise."""
    files = read_gguf_tokenizer(GGUFFile(path).metadata, str(path)).files
    files.core.save(str(folder / "tokenizer.json"))
    templates = [{"name": name, "template": text} for name, text in files.templates.items()]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **files.special, "chat_template": templates}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def config_of(hf: HFConfig) -> dict[str, Any]:
    """Return a config.json. Raises ModelError for other families, and for positions scaled as no config can say."""
    if hf.model_type not in CLASSES:
        raise ModelError(f"other engines are compared on files of {', '.join(CLASSES)}, and this is {hf.model_type}")
    left_out = ("scaling", "sliding_window", "architecture")
    plain = {name: value for name, value in asdict(hf).items() if name not in left_out}
    rope = _scaling(hf.scaling, hf)
    return {
        "architectures": [CLASSES[hf.model_type]], "hidden_act": "silu", "torch_dtype": "float16", **plain,
        **({"rope_scaling": rope} if rope else {}),
    }  # fmt: skip


def _scaling(scaling: Scaling, hf: HFConfig) -> dict[str, Any]:
    match scaling:
        case Unscaled():
            return {}
        case Linear():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Yarn():
            return {
                "rope_type": "yarn", "factor": scaling.factor, "beta_fast": scaling.fast_turns,
                "beta_slow": scaling.slow_turns, "original_max_position_embeddings": scaling.original_positions,
                "attention_factor": scaling.scale,
            }  # fmt: skip
        case Divided():
            candidate = replace(LLAMA3, factor=max(scaling.divisors))
            there, here = (each.frequencies(hf.rope_theta, hf.head_dim, 0)[0] for each in (scaling, candidate))
            if np.allclose(here, there, rtol=1e-3):
                return {
                    "rope_type": "llama3", "factor": candidate.factor, "low_freq_factor": candidate.low_turns,
                    "high_freq_factor": candidate.high_turns,
                    "original_max_position_embeddings": candidate.original_positions,
                }  # fmt: skip
    raise ModelError("a config.json cannot say how this file scales positions")


def _shards(model: GGUFModel) -> Iterator[dict[str, Tensor]]:
    found: dict[str, Tensor] = {}
    for name, archive in model.archives(packed=False).items():
        view = archive.view(name)
        assert isinstance(view, np.ndarray)
        found[name] = tensor_of(view).to(torch.float16).contiguous()
        if sum(tensor.nbytes for tensor in found.values()) > SHARD:
            yield found
            found = {}
    if found:
        yield found

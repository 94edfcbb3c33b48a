"""A feature draft's folder, written: the names and fields that `feature_draft_file` reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from triforce.checkpoint.feature_draft_file import FORMAT, THETA, FeatureDraftFile
from triforce.checkpoint.feature_draft_tensors import CHOSEN, FC_NORM, NAMES, OFFSETS
from triforce.errors import RequestError
from triforce.whole_file import whole_file


def write_feature_draft(folder: Path, draft: FeatureDraftFile) -> None:
    """Write a draft in bfloat16: each file is there whole, or as it was before. Raises OSError."""
    config, weights = draft.config, draft.weights
    named = dict(weights.trained())
    norms_SC = named.pop("fc_norm_SC", torch.empty(0, 1))
    tensors = {NAMES[field]: tensor for field, tensor in named.items()}
    tensors |= {FC_NORM.format(i): norm_C for i, norm_C in enumerate(norms_SC)}
    stored = {name: tensor.detach().bfloat16().contiguous() for name, tensor in tensors.items()}
    chosen_V = torch.zeros(config.vocab_size, dtype=torch.bool)
    chosen_V[weights.tokens_M] = True
    stored |= {OFFSETS: weights.tokens_M - torch.arange(config.choices), CHOSEN: chosen_V}
    write_whole(folder / "model.safetensors", save(stored))
    about: dict[str, Any] = {"format": FORMAT, "target": draft.target, "state_layers": list(config.state_layers)}
    about |= {"sinks": config.sinks, "window": config.window, "card": draft.card}
    about |= {"embedding_residual": config.embedding_residual}
    values = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "vocab_size": config.vocab_size, "draft_vocab_size": config.choices, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "rms_norm_eps": config.norm_eps,
        "rope_theta": THETA, "fc_norm": config.fc_norm, "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual, "triforce": about,
    }  # fmt: skip
    write_whole(folder / "config.json", (json.dumps(values, indent=2) + "\n").encode())


def write_whole(file: Path, data: bytes | memoryview) -> None:
    """Write a file, whole or not at all. Raises RequestError."""
    try:
        with whole_file(file) as partial, partial.open("wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise RequestError(
            f"{file} cannot be written ({error.strerror}); make room: the same command goes on from there"
        ) from error

"""Cases of EAGLE heads, published ones and our own, with spoiled configs or tensors."""

from __future__ import annotations

import json
import shutil
from functools import cache, partial
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.eagle3_reference import random_checkpoint
from tests.helpers.eagle_pair import eagle_pair
from tests.helpers.forked_folder import made_apart
from tests.helpers.fuzz_kinds.config_json import ASKED, generated
from tests.helpers.fuzz_kinds.safetensors_header import spoil, spoil_bytes
from tests.helpers.hostile_values import as_json, spoiled
from tests.helpers.safetensors_bytes import parts, write

FIELDS = [
    "draft_vocab_size", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "max_position_embeddings", "num_hidden_layers", "sinks",
    "window", "state_layers", "eagle_config", "eagle_aux_hidden_state_layer_ids", "fc_norm", "norm_output", "format",
    "target", "triforce", "target_hidden_size", "embedding_residual", "hidden_act", "card",
]  # fmt: skip
TYPES = [torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64, torch.float64, torch.float16, torch.uint8]


@cache
def whole() -> Path:
    """Return a folder with a target of eight layers, and a draft of ours and a published one for it."""

    def make(folder: Path) -> None:
        eagle_pair(folder, num_hidden_layers=8)
        (folder / "published").mkdir()
        tensors, config = random_checkpoint(vocab_size=300)
        save_file(tensors, folder / "published" / "model.safetensors")
        (folder / "published" / "config.json").write_text(json.dumps(config))

    return made_apart(make)


def copied(name: str, folder: Path) -> Path:
    """Copy one of the drafts into an empty folder."""
    return Path(shutil.copytree(whole() / name, folder / "draft"))


DRAFTS = ["draft", "published"]
WHOLES = [partial(copied, name) for name in DRAFTS]


def make_case(random: Random, folder: Path) -> None:
    draft = copied(random.choice(DRAFTS), folder)
    weights, config = draft / "model.safetensors", draft / "config.json"
    match random.randrange(5):
        case 0 | 1:
            config.write_text(as_json(spoiled(random, json.loads(config.read_text()), FIELDS)))
        case 2:
            header, data = parts(weights)
            spoil(random, header, len(data))
            write(weights, header, data)
        case 3:
            spoil_tensors(random, weights)
        case 4:
            spoil_bytes(random, weights)


def spoil_tensors(random: Random, file: Path) -> None:
    """Give a tensor another type or shape, or a table other numbers."""
    tensors = load_file(file)
    name = random.choice([*tensors, "d2t", "d2t", "t2d", "t2d"])
    tensor = tensors[name]
    match random.randrange(6):
        case 0:
            tensors[name] = tensor.to(random.choice(TYPES))
        case 1:
            tensors[name] = tensor[None].clone()
        case 2:
            tensors[name] = tensor.flatten()[: random.choice([0, 1, 5])].clone()
        case 3:
            tensors[name] = torch.full_like(tensor, random.choice([0, 1]))
        case 4:
            order = random.sample(range(tensor.numel()), tensor.numel())
            tensors[name] = tensor.flatten()[order].view(tensor.shape).clone()
        case 5:
            tensors[random.choice([f"{name}\n\x1b[2J", "head", "fc_norm.7.weight"])] = tensors.pop(name)
    save_file(tensors, file)


def open_case(folder: Path) -> int:
    """Generate a text with the draft."""
    return generated([str(whole() / "target"), "--draft", str(folder / "draft"), "--mode", "draft", *ASKED])

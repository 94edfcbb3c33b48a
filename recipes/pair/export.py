"""Writes the shipped folders: bf16 safetensors with the names of `LlamaForCausalLM`, and tokenizer files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig

from recipes.pair.config import Config
from recipes.pair.train import load_model

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
SHARD = "15MB"


def run(config: Config, work: Path, out: Path) -> None:
    """Write `target/` and `draft/` to `out`. A second call writes the same files."""
    for name in ("target", "draft"):
        _export(config, work, name, out / name)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


def _export(config: Config, work: Path, name: str, folder: Path) -> None:
    model = load_model(config, name, work).to("cpu", torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0, do_sample=True)
    model.save_pretrained(folder, max_shard_size=SHARD)
    for shard in folder.glob("*.safetensors"):
        shard.chmod(0o644)  # safetensors makes files that only their owner can read, and a wheel keeps modes
    _add_older_keys(folder / "config.json")
    for file in TOKENIZER_FILES:
        shutil.copyfile(work / "tokenizer" / file, folder / file)


def _add_older_keys(path: Path) -> None:
    """Add the keys `rope_theta` and `rope_scaling`, which transformers read before `rope_parameters` existed."""
    values = json.loads(path.read_text(encoding="utf-8"))
    rope = dict(values["rope_parameters"])
    older = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": None if rope["rope_type"] == "default" else rope}
    path.write_text(json.dumps(values | older, indent=2) + "\n", encoding="utf-8")

"""The shipped folders: bf16 safetensors in the layout of `LlamaForCausalLM`, and tokenizer files."""

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
    """Writes `target/` and `draft/` under `out`; again gives the same files."""
    for name in ("target", "draft"):
        _export(config, work, name, out / name)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


def _export(config: Config, work: Path, name: str, folder: Path) -> None:
    model = load_model(config, name, work).to("cpu", torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0, do_sample=True)
    model.save_pretrained(folder, max_shard_size=SHARD)
    for shard in folder.glob("*.safetensors"):
        shard.chmod(0o644)  # safetensors writes for its owner alone, and a wheel keeps modes
    _add_older_keys(folder / "config.json")
    for file in TOKENIZER_FILES:
        shutil.copyfile(work / "tokenizer" / file, folder / file)


def _add_older_keys(path: Path) -> None:
    """Adds what readers older than `rope_parameters` look for."""
    values = json.loads(path.read_text(encoding="utf-8"))
    rope = dict(values["rope_parameters"])
    older = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": None if rope["rope_type"] == "default" else rope}
    path.write_text(json.dumps(values | older, indent=2) + "\n", encoding="utf-8")

"""Model names as folders of files, JSON from them, and drafts that are known to share a target's vocabulary."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from triforce.errors import ModelError, suggest

# No *.py: code from a repository is never run. No other *.safetensors: some repositories hold the weights twice.
TEXTS = ("*.json", "*.jinja", "tokenizer*")
SAFETENSORS = ("model.safetensors", "model-*.safetensors")
PICKLES = ("pytorch_model.bin", "pytorch_model-*.bin")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

_PAIR = Path(__file__).parents[1] / "assets" / "pair"
SHIPPED = _PAIR / "target", _PAIR / "draft"
"""The target and the draft that come with the package."""

_DRAFTS = {
    "NousResearch/Yarn-Llama-2-7b-128k": "JackFram/llama-68m",
    "NousResearch/Yarn-Llama-2-13b-128k": "JackFram/llama-68m",
    "LargeWorldModel/LWM-Text-128K": "JackFram/llama-68m",
    "LargeWorldModel/LWM-Text-Chat-128K": "JackFram/llama-68m",
    "meta-llama/Llama-3.1-8B": "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.1-70B-Instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-14B-Instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen3-8B": "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-14B": "Qwen/Qwen3-0.6B",
}


def model_path(name_or_path: str | Path) -> Path:
    """Return where a model is: a folder or a GGUF file; of a repository a snapshot. Raises ModelError."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        return found[0] if found and not (path / "config.json").exists() else path
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                return path
        raise ModelError(f"{path} is no GGUF file; give one, or the folder that holds config.json and the weights")
    if isinstance(name_or_path, Path) or not HUB_NAME.fullmatch(name_or_path):
        raise ModelError(
            f"there is no folder {path}{_nearby(path)}; give a model's folder, a GGUF file or a Hugging Face name such "
            "as org/model"
        )
    return _snapshot(name_or_path)


def draft_for(target: str | Path) -> str | Path | None:
    """The draft of a known target: by hub name, or, for a folder of that name, the draft's folder beside it."""
    folder = Path(target)
    if not folder.is_dir():
        return _DRAFTS.get(str(target))
    if folder.resolve() == SHIPPED[0].resolve():
        return SHIPPED[1]
    drafts = {name.split("/")[1]: draft.split("/")[1] for name, draft in _DRAFTS.items()}
    sibling = folder.resolve().parent / drafts.get(folder.resolve().name, "")
    return sibling if folder.resolve().name in drafts and sibling.is_dir() else None


def _snapshot(name: str) -> Path:
    import huggingface_hub

    def fetch(*patterns: str) -> Path:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))

    try:
        folder = fetch(*TEXTS, *SAFETENSORS)
        return folder if any(folder.glob("model*.safetensors")) else fetch(*TEXTS, *PICKLES)
    except Exception as error:  # offline, missing, gated, a bad name, a full disk: each has its own unrelated type
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"{name!r} is not a folder here{_nearby(Path(name))} and could not be fetched from the Hugging Face hub "
            f"({reason}); "
            "check the name and the connection, and run `hf auth login` first if the model is gated"
        ) from error


def _nearby(missing: Path) -> str:
    """Return a suggestion of a folder beside a missing one; an empty text if none is near."""
    parent = missing.parent
    readable = parent.is_dir() and os.access(parent, os.R_OK)
    return suggest(str(missing), [str(each) for each in parent.iterdir() if each.is_dir()] if readable else [])


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError if it is missing, or holds anything else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{file} is missing; give a complete Hugging Face model folder") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} does not hold a JSON object; download it again")
    return value

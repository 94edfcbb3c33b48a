"""From the name of a model to a folder of files, and JSON out of them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from triforce.errors import ModelError
from triforce.suggest import suggest

# No *.py: code from a repository is never run. No other *.safetensors: some repositories hold the weights twice.
TEXTS = ("*.json", "*.jinja", "tokenizer*")
SAFETENSORS = ("model.safetensors", "model-*.safetensors")
PICKLES = ("pytorch_model.bin", "pytorch_model-*.bin")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def model_folder(name_or_path: str | Path) -> Path:
    """The folder of a model: `name_or_path` itself, or a snapshot of that Hugging Face repository.

    Raises ModelError if it is neither.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    if _is_gguf(folder):
        raise ModelError(
            f"{folder} is a GGUF file, and these cannot be read yet; give the model's Hugging Face folder, with "
            "config.json and safetensors"
        )
    if folder.exists():
        raise ModelError(f"{folder} is a file; give the folder that holds config.json and the weights")
    if isinstance(name_or_path, Path) or not HUB_NAME.fullmatch(name_or_path):
        raise ModelError(
            f"there is no folder {folder}{_nearby(folder)}; give a model's folder or a Hugging Face name such as "
            "org/model"
        )
    return _snapshot(name_or_path)


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


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
    """What folder beside a missing one may be meant."""
    beside = missing.parent
    readable = beside.is_dir() and os.access(beside, os.R_OK)
    return suggest(str(missing), [str(each) for each in beside.iterdir() if each.is_dir()] if readable else [])


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

"""Resolution of model names to folders or files, their JSON, and drafts known to share a target's vocabulary."""

from __future__ import annotations

import glob
import json
import os
import re
from errno import ENAMETOOLONG
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from triforce.checkpoint.gguf.file import choose_gguf, log_choice, model_files, model_names
from triforce.checkpoint.model_sources import CONNECT, KNOWN, SMOLLM2, find, hub_reason, offline, require_no_address
from triforce.errors import ModelError, nearest, unreadable
from triforce.interface.quantities import user_path

# No *.py: code from a repository is never run. No other *.safetensors: some repositories hold the weights twice.
TEXTS = ("*.json", "*.jinja", "tokenizer*")
SAFETENSORS = ("model.safetensors", "model-*.safetensors")
PICKLES = ("pytorch_model.bin", "pytorch_model-*.bin")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
"""A repository, optionally with a GGUF file's quantisation behind a colon."""
NAME_FORM = "a name on the hub is org/model, with :Q4_K_M or the like behind it for one of several GGUF files"

LONGEST_JSON = 64 << 20
"""Bytes of the longest JSON file that is read. Indices of the largest models take some 10 MB."""

_ASSETS = Path(__file__).parents[1] / "assets"
SHIPPED = _ASSETS / "pair" / "target", _ASSETS / "pair" / "draft"
"""The target and the draft that the package ships."""

FINETUNE = "finetune:"
"""Prefix of a draft's name: the target is a finetune of the model that the draft was trained for."""

_OWN_DRAFTS = {SMOLLM2.name: f"{FINETUNE}{_ASSETS / SMOLLM2.name}"}
"""Drafts that ship for known models, for every dtype of the target."""

DRAFTS_BY_TARGET = {
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
"""Drafts on the hub, by the target's name."""


class UnknownModel(ModelError):
    """A name of no local model. The hub has no model of this name either, or cannot be reached."""


def model_path(name_or_path: str | Path, *, weights: bool = True) -> Path:
    """Return a model's path: a folder or a GGUF file. A Hugging Face repository is downloaded to its local cache.

    A quantisation may stand behind a colon. weights: whether weights are needed. If not, they are downloaded only where
    they hold the config (GGUF). Raises ModelError.
    """
    try:
        return _locate(name_or_path, weights)
    except PermissionError as error:
        raise unreadable(error.filename or str(name_or_path), error) from error


def _locate(name_or_path: str | Path, weights: bool) -> Path:
    """Return a model's path. Raises ModelError and PermissionError."""
    path = user_path(name_or_path)
    try:
        path.stat()
    except OSError as error:
        if error.errno == ENAMETOOLONG:
            raise ModelError(f"{str(path)[:60]!r} ... is too long for a name; give a model's folder, a GGUF file or a "
                             "Hugging Face name such as org/model") from error  # fmt: skip
    except ValueError:
        raise ModelError(f"{str(path)!r} is no name of a file; give a model's folder, a GGUF file or a Hugging Face "
                         "name such as org/model") from None  # fmt: skip
    if path.is_dir():
        return path if (path / "config.json").exists() else _in_folder(path, "")
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                return path
        if not path.stat().st_size:
            raise ModelError(f"{path} is empty; download it again")
        raise ModelError(f"{path} is no GGUF file; give one, or the folder that holds config.json and the weights")
    folder, _, quantisation = str(path).rpartition(":")
    if folder and quantisation and Path(folder).is_dir():
        return _in_folder(Path(folder), quantisation)
    is_file = path.suffix == ".gguf"  # never a name on the hub
    if is_file or isinstance(name_or_path, Path) or not HUB_NAME.fullmatch(name_or_path):
        require_no_address(str(name_or_path), NAME_FORM)
        kind = "file" if is_file else "folder"
        raise ModelError(
            f"there is no {kind} {path}{_suggest_folder(path)}; give a model's folder, a GGUF file or a Hugging Face "
            "name such as org/model"
        )
    if name_or_path in KNOWN:
        return find(KNOWN[name_or_path])
    _require_hub_name(name_or_path)
    return _snapshot(name_or_path, weights)


def local_path(name_or_path: str | Path) -> Path | None:
    """Return a model's path if it is on this machine; None if it would have to be downloaded."""
    if os.path.exists(name_or_path):  # unlike Path.exists, it takes names that are too long
        return Path(name_or_path)
    try:
        return _download(str(name_or_path), local_only=True)
    except Exception:  # the hub's client raises unrelated types
        return None


def _in_folder(folder: Path, quantisation: str) -> Path:
    """Return the GGUF file in a folder. Without GGUF files and without a `quantisation`, return the folder itself.

    Raises ModelError, also if the files belong to several models.
    """
    names = [file.name for file in folder.glob("*.gguf")]
    if not names and not quantisation:
        return folder
    files = choose_gguf(names, quantisation, str(folder))
    file = folder / files[0]
    models = model_files(names)
    if len(model_names(models)) > 1:
        raise ModelError(f"{folder} has GGUF files of several models: {', '.join(models)}; name the file, say {file}")
    log_choice(files, names, str(folder))
    return file


def model_name(model: str | Path | None) -> str:
    """Return a model's public name: its hub name, or its folder's name without the path, which stays private."""
    if model is None:
        return "triforce"
    return Path(model).resolve().name if os.path.exists(model) else str(model)


def draft_for(target: str | Path, file: Path) -> str | Path | None:
    """Return the draft of a known target; for a target folder of a known name, the draft's folder beside it.

    file: the target's file. A file with a known model's name and size counts as that model.
    """
    folder = Path(target)
    if not folder.is_dir():
        known_model = {model.file: model for model in KNOWN.values()}.get(file.name)
        name = known_model.name if known_model and file.stat().st_size == known_model.size else str(target)
        return _OWN_DRAFTS.get(name) or DRAFTS_BY_TARGET.get(name)
    if folder.resolve() == SHIPPED[0].resolve():
        return SHIPPED[1]
    drafts = {name.split("/")[1]: draft.split("/")[1] for name, draft in DRAFTS_BY_TARGET.items()}
    sibling = folder.resolve().parent / drafts.get(folder.resolve().name, "")
    return sibling if folder.resolve().name in drafts and sibling.is_dir() else None


def _require_hub_name(name: str) -> None:
    """Raise UnknownModel for a misspelt name in `KNOWN`, or an Ollama tag, without a request to the hub."""
    base_name, colon, _ = name.partition(":")
    similar_name = nearest(base_name, KNOWN)
    if "/" not in name and (similar_name or colon):
        raise UnknownModel(
            f"there is no model {name!r}{f' (did you mean {similar_name}?)' if similar_name else ''}; {NAME_FORM}"
        )


def _snapshot(name: str, weights: bool) -> Path:
    repository, _, quantisation = name.partition(":")
    try:
        names = _file_names(repository)
        has_safetensors = any(fnmatch(file, pattern) for file in names for pattern in SAFETENSORS)
        if quantisation or (not has_safetensors and any(file.endswith(".gguf") for file in names)):
            gguf_files = choose_gguf(names, quantisation, repository)
            log_choice(gguf_files, names, repository)
            return _download(repository, *map(glob.escape, gguf_files)) / gguf_files[0]
        if not weights:
            return _download(repository, *TEXTS)
        folder = _download(repository, *TEXTS, *SAFETENSORS)
        has_weights = any(folder.glob("model*.safetensors"))
        return folder if has_weights else _download(repository, *TEXTS, *PICKLES)
    except ModelError:
        raise
    except Exception as error:  # offline, missing, gated, a bad name, a full disk: unrelated exception types
        raise UnknownModel(
            f"{name!r} is not a folder here{_suggest_folder(Path(name))}{_fetch_failure(name, error)}"
        ) from error


def _fetch_failure(name: str, error: Exception) -> str:
    """Return the end of an error message: why the download from the hub failed, and advice."""
    name_advice = "" if "/" in name else f"; {NAME_FORM}"
    if offline():
        return (
            " and not among the models that were fetched from the Hugging Face hub, and nothing is fetched offline "
            f"(--offline, HF_HUB_OFFLINE); run this once with a connection{name_advice}"
        )
    reason = hub_reason(error)
    advice = "check the name and the connection, and run `hf auth login` first if the model is gated"
    return f" and could not be fetched from the Hugging Face hub ({reason}); {advice}{name_advice}"


def _file_names(repository: str) -> list[str]:
    """Return the names of a repository's files: the hub's list, or the local files if the hub cannot be reached."""
    import huggingface_hub

    try:
        if not offline():
            model_info = huggingface_hub.HfApi().model_info(repository, timeout=CONNECT)
            return [file.rfilename for file in model_info.siblings or ()]
    except Exception as error:
        try:
            folder = _download(repository, local_only=True)
        except Exception:
            raise error from error.__cause__
    else:
        folder = _download(repository, local_only=True)
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def _download(repository: str, *patterns: str, local_only: bool = False) -> Path:
    """Download the files that match `patterns`; return the repository's folder. local_only: nothing is fetched."""
    import huggingface_hub

    return Path(
        huggingface_hub.snapshot_download(
            repository, local_files_only=local_only or offline(), allow_patterns=list(patterns), etag_timeout=CONNECT
        )
    )


def _suggest_folder(missing_path: Path) -> str:
    """Return "did you mean" for a folder with a similar name beside `missing_path`; an empty text if there is none."""
    parent = missing_path.parent
    readable = parent.is_dir() and os.access(parent, os.R_OK)
    similar_folder = (
        nearest(missing_path.name, [file.name for file in parent.iterdir() if file.is_dir()]) if readable else None
    )
    return f" (did you mean {parent / similar_folder}?)" if similar_folder else ""


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ModelError if the file is missing, too long, or no JSON object."""
    try:
        if file.stat().st_size > LONGEST_JSON:
            raise ModelError(f"{file} is longer than {LONGEST_JSON >> 20} MiB, the limit for JSON; download it again")
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{file} is missing; give a complete Hugging Face model folder") from error
    except OSError as error:
        raise unreadable(file, error) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} does not hold a JSON object; download it again")
    return value

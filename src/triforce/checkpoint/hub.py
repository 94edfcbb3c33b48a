"""Model names as folders of files, JSON from them, and drafts that are known to share a target's vocabulary."""

from __future__ import annotations

import glob
import json
import os
import re
from errno import ENAMETOOLONG
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from triforce.checkpoint.gguf.file import choose_gguf, model_files, model_names
from triforce.checkpoint.model_sources import CONNECT, KNOWN, SMOLLM2, find, hub_reason, offline, require_no_address
from triforce.errors import ModelError, nearest, unreadable
from triforce.interface.byte_size import user_path

# No *.py: code from a repository is never run. No other *.safetensors: some repositories hold the weights twice.
TEXTS = ("*.json", "*.jinja", "tokenizer*")
SAFETENSORS = ("model.safetensors", "model-*.safetensors")
PICKLES = ("pytorch_model.bin", "pytorch_model-*.bin")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
"""A repository, and behind a colon the quantisation of a GGUF file in it."""
WANTED = "a name on the hub is org/model, with :Q4_K_M or the like behind it for one of several GGUF files"

LONGEST_JSON = 64 << 20
"""Bytes of the longest JSON file that is read: indices of the largest models take some 10 MB."""

_ASSETS = Path(__file__).parents[1] / "assets"
SHIPPED = _ASSETS / "pair" / "target", _ASSETS / "pair" / "draft"
"""The target and the draft that come with the package."""

FINETUNE = "finetune:"
"""Before a draft's name: the target is a finetune of the model that it was trained for."""

_OWN_DRAFTS = {SMOLLM2.name: f"{FINETUNE}{_ASSETS / SMOLLM2.name}"}
"""Drafts that come for known models, in whatever type these are read."""

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


class UnknownModel(ModelError):
    """A name that no model has, here or on the hub, as far as that can be asked."""


def model_path(name_or_path: str | Path, *, weights: bool = True) -> Path:
    """Return where a model is: a folder or a GGUF file, of a Hugging Face repository as it is kept here.

    A quantisation may stand behind a colon. weights: whether they are needed; without, they are fetched only where a
    config is nowhere else. Raises ModelError.
    """
    try:
        return _located(name_or_path, weights)
    except PermissionError as error:
        raise unreadable(error.filename or str(name_or_path), error) from error


def _located(name_or_path: str | Path, weights: bool) -> Path:
    """Return where a model is. Raises ModelError, and PermissionError."""
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
    is_file = path.suffix == ".gguf"  # and no name on the hub
    if is_file or isinstance(name_or_path, Path) or not HUB_NAME.fullmatch(name_or_path):
        require_no_address(str(name_or_path), WANTED)
        kind = "file" if is_file else "folder"
        raise ModelError(
            f"there is no {kind} {path}{_nearby(path)}; give a model's folder, a GGUF file or a Hugging Face name such "
            "as org/model"
        )
    if name_or_path in KNOWN:
        return find(KNOWN[name_or_path])
    _require_hub_name(name_or_path)
    return _snapshot(name_or_path, weights)


def path_here(name_or_path: str | Path) -> Path | None:
    """Return where a model is that is here; None for one that would have to be fetched."""
    if (path := Path(name_or_path)).exists():
        return path
    try:
        return _fetched(str(name_or_path), here=True)
    except Exception:  # the hub's client has an unrelated type for each cause
        return None


def _in_folder(folder: Path, quantisation: str) -> Path:
    """Return a GGUF file in a folder; the folder itself where none is, and none was asked for.

    Raises ModelError, also where files are of several models.
    """
    names = [file.name for file in folder.glob("*.gguf")]
    if not names and not quantisation:
        return folder
    file = folder / choose_gguf(names, quantisation, str(folder))[0]
    models = model_files(names)
    if len(model_names(models)) > 1:
        raise ModelError(f"{folder} has GGUF files of several models: {', '.join(models)}; name the file, say {file}")
    return file


def model_name(model: str | Path | None) -> str:
    """A model is called what its hub or its folder calls it; where the folder lies is nobody's business."""
    if model is None:
        return "triforce"
    return Path(model).resolve().name if os.path.exists(model) else str(model)


def draft_for(target: str | Path, file: Path) -> str | Path | None:
    """The draft of a known target: by name, or, for a folder of that name, the draft's folder beside it.

    file: where the target is; that of a known model is as good as its name.
    """
    folder = Path(target)
    if not folder.is_dir():
        known = {model.file: model for model in KNOWN.values()}.get(file.name)
        name = known.name if known and file.stat().st_size == known.size else str(target)
        return _OWN_DRAFTS.get(name) or _DRAFTS.get(name)
    if folder.resolve() == SHIPPED[0].resolve():
        return SHIPPED[1]
    drafts = {name.split("/")[1]: draft.split("/")[1] for name, draft in _DRAFTS.items()}
    sibling = folder.resolve().parent / drafts.get(folder.resolve().name, "")
    return sibling if folder.resolve().name in drafts and sibling.is_dir() else None


def _require_hub_name(name: str) -> None:
    """Raise ModelError for a name that is like one of ours, or a tag of Ollama: before the hub is asked."""
    word, colon, _ = name.partition(":")
    near = nearest(word, KNOWN)
    if "/" not in name and (near or colon):
        raise UnknownModel(f"there is no model {name!r}{f' (did you mean {near}?)' if near else ''}; {WANTED}")


def _snapshot(name: str, weights: bool) -> Path:
    repository, _, quantisation = name.partition(":")
    try:
        names = _listed(repository)
        other = any(fnmatch(file, pattern) for file in names for pattern in SAFETENSORS)
        if quantisation or (not other and any(file.endswith(".gguf") for file in names)):
            chosen = choose_gguf(names, quantisation, repository)
            return _fetched(repository, *map(glob.escape, chosen)) / chosen[0]
        if not weights:
            return _fetched(repository, *TEXTS)
        folder = _fetched(repository, *TEXTS, *SAFETENSORS)
        found = any(folder.glob("model*.safetensors"))
        return folder if found else _fetched(repository, *TEXTS, *PICKLES)
    except ModelError:
        raise
    except Exception as error:  # offline, missing, gated, a bad name, a full disk: each has its own unrelated type
        raise UnknownModel(f"{name!r} is not a folder here{_nearby(Path(name))}{_unfetched(name, error)}") from error


def _unfetched(name: str, error: Exception) -> str:
    """Return why a model is not here from the hub, and what to do, to stand behind what it is not."""
    shape = "" if "/" in name else f"; {WANTED}"
    if offline():
        return (
            " and not among the models that were fetched from the Hugging Face hub, and nothing is fetched offline "
            f"(--offline, HF_HUB_OFFLINE); run this once with a connection{shape}"
        )
    why = hub_reason(error)
    advice = "check the name and the connection, and run `hf auth login` first if the model is gated"
    return f" and could not be fetched from the Hugging Face hub ({why}); {advice}{shape}"


def _listed(repository: str) -> list[str]:
    """Return the names of a repository's files: as the hub lists them, or those that are here if it cannot be asked."""
    import huggingface_hub

    try:
        if not offline():
            about = huggingface_hub.HfApi().model_info(repository, timeout=CONNECT)
            return [file.rfilename for file in about.siblings or ()]
    except Exception as error:
        try:
            folder = _fetched(repository, here=True)
        except Exception:
            raise error from error.__cause__
    else:
        folder = _fetched(repository, here=True)
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def _fetched(repository: str, *patterns: str, here: bool = False) -> Path:
    """Return the folder of a repository once the files of some patterns are in it; here: as it is, nothing fetched."""
    import huggingface_hub

    return Path(
        huggingface_hub.snapshot_download(
            repository, local_files_only=here or offline(), allow_patterns=list(patterns), etag_timeout=CONNECT
        )
    )


def _nearby(missing: Path) -> str:
    """Return a suggestion of a folder beside a missing one; an empty text if none is near."""
    parent = missing.parent
    readable = parent.is_dir() and os.access(parent, os.R_OK)
    near = nearest(missing.name, [file.name for file in parent.iterdir() if file.is_dir()]) if readable else None
    return f" (did you mean {parent / near}?)" if near else ""


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError if it is missing, longer than `LONGEST_JSON`, or anything else."""
    try:
        if file.stat().st_size > LONGEST_JSON:
            raise ModelError(f"{file} is longer than {LONGEST_JSON >> 20} MiB, as no such file is; download it again")
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

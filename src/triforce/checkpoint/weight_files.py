"""The weight files of a folder, mapped into memory: safetensors, or pickles read by torch's weights-only loader."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from triforce.checkpoint.hub import read_json
from triforce.errors import ModelError
from triforce.model.weights import Matrix


class Archive(Protocol):
    """A weight file: tensors by name."""

    packed: bool
    """Whether its tensors keep their own types, for kernels that read them so."""

    def view(self, name: str) -> Matrix:
        """The tensor, in its shape, as it lies in the mapped file: for as long as the model lives."""

    def glance(self, name: str) -> Matrix:
        """The same for a moment, to be copied from: its pages leave memory with it, where the format allows."""


def open_archives(folder: Path) -> dict[str, Archive]:
    """Each tensor name of the folder's weights, and the file that holds it; safetensors before pickles.

    Raises ModelError if there are none, or naming the file that is missing, corrupt or unsafe.
    """
    for stem, suffix, kind in (("model", ".safetensors", Safetensors), ("pytorch_model", ".bin", Pickle)):
        if files := _files(folder, stem, suffix):
            archives = [kind(file) for file in files]
            return {name: archive for archive in archives for name in archive.names()}
    raise ModelError(
        f"{folder} has no weights: expected model.safetensors or pytorch_model.bin, or shards with their .index.json"
    )


def stamp(path: Path) -> str:
    """Return what tells the weights of a folder, or a file of them, from others before any is read.

    It has the name of each file, its size and when it was changed. Nothing where there are none.
    """
    files = [path] if path.is_file() else [each for each in path.iterdir() if each.suffix in (".safetensors", ".bin")]
    facts = [(each.name, each.stat()) for each in sorted(files) if each.exists()]
    return " ".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in facts)


def _files(folder: Path, stem: str, suffix: str) -> list[Path]:
    single, index = folder / f"{stem}{suffix}", folder / f"{stem}{suffix}.index.json"
    if single.exists() or not index.exists():
        return [single] if single.exists() else []
    shards = read_json(index).get("weight_map")
    # Files of the folder itself: an index may not point elsewhere.
    if not isinstance(shards, dict) or not shards or not all(Path(str(s)).name == s for s in shards.values()):
        raise ModelError(f"{index} has no valid weight_map; download it again")
    return [folder / shard for shard in sorted(set(shards.values()))]


class Safetensors:
    """Views of one mapping of the file: no second copy."""

    packed = False

    def __init__(self, file: Path) -> None:
        self._file = file
        self._shared = self._open()

    def names(self) -> Iterable[str]:
        return list(self._shared.keys())

    def view(self, name: str) -> Tensor:
        tensor: Tensor = self._shared.get_tensor(name)
        return tensor

    def glance(self, name: str) -> Tensor:
        with self._open() as fresh:  # pages read through the shared mapping would stay as long as any view of it
            tensor: Tensor = fresh.get_tensor(name)
        return tensor

    def _open(self) -> Any:  # safetensors leaves its handle untyped
        try:
            return safe_open(self._file, framework="pt")
        except FileNotFoundError as error:
            raise _missing(self._file) from error
        except (SafetensorError, OSError, ValueError) as error:
            raise _corrupt(self._file, error) from error


class Pickle:
    """A pickled state dict. Nothing in it is run: torch's loader builds tensors and plain containers only."""

    packed = False

    def __init__(self, file: Path) -> None:
        try:
            self._tensors: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except FileNotFoundError as error:
            raise _missing(file) from error
        except pickle.UnpicklingError as error:
            raise ModelError(
                f"{file} holds more than tensors and is not opened, as it could run code; "
                "ask for a safetensors version of this model"
            ) from error
        except Exception as error:  # a damaged zip or pickle surfaces as nearly anything
            raise _corrupt(file, error) from error
        if not isinstance(self._tensors, dict) or not all(isinstance(t, Tensor) for t in self._tensors.values()):
            raise ModelError(f"{file} is not a state dict of tensors; convert the model to safetensors")

    def names(self) -> Iterable[str]:
        return self._tensors

    def view(self, name: str) -> Tensor:
        return self._tensors[name].detach()

    glance = view


def _missing(file: Path) -> ModelError:
    return ModelError(f"{file} is missing, though the index of shards names it; download it again")


def _corrupt(file: Path, error: Exception) -> ModelError:
    reason = str(error).strip().partition("\n")[0]
    return ModelError(f"{file} is corrupt, truncated or a Git LFS pointer ({reason}); download it again")

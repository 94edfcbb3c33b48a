"""The weight files of a folder, mapped into memory: safetensors, or pickles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from triforce.checkpoint.hub import read_json
from triforce.checkpoint.pickle_file import Pickle, corrupt, missing, reason_of, require_harmless
from triforce.errors import ModelError
from triforce.model.weights import Matrix


class Archive(Protocol):
    """A weight file: tensors by name."""

    packed: bool
    """Whether its tensors keep their own types, for kernels that read them so."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as the file tells it: nothing is read for that."""

    def view(self, name: str) -> Matrix:
        """The tensor, in its shape, as it lies in the mapped file: for as long as the model lives."""

    def glance(self, name: str) -> Matrix:
        """The same for a moment, to be copied from: its pages leave memory with it, where the format allows."""


def open_archives(folder: Path) -> dict[str, Archive]:
    """Each tensor name of the folder's weights, and the file that holds it; safetensors before pickles.

    Raises ModelError if there are none, or naming the file that is missing, corrupt or unsafe.
    """
    archives: Sequence[Safetensors | Pickle] = []
    if files := _files(folder, "model", ".safetensors"):
        archives = [Safetensors(file) for file in files]
    elif files := _files(folder, "pytorch_model", ".bin"):
        require_harmless(files)
        archives = [Pickle(file) for file in files]
    if files:
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


def has_weights(folder: Path) -> bool:
    """Whether a folder has weight files, or an index of them."""
    return any(
        (folder / f"{name}{index}").exists()
        for name in ("model.safetensors", "pytorch_model.bin")
        for index in ("", ".index.json")
    )


def require_shape(archives: Mapping[str, Archive], name: str, shape: tuple[int, ...]) -> None:
    """Raise ModelError unless a tensor has the shape that a config asks for."""
    if (found := archives[name].shape(name)) != shape:
        raise ModelError(f"tensor {name} has shape {list(found)}, but the config asks for {list(shape)}")


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

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._shared.get_slice(name).get_shape())

    def view(self, name: str) -> Tensor:
        return self._tensor(self._shared, name)

    def glance(self, name: str) -> Tensor:
        with self._open() as fresh:  # pages read through the shared mapping would stay as long as any view of it
            return self._tensor(fresh, name)

    def _tensor(self, opened: Any, name: str) -> Tensor:
        try:
            tensor: Tensor = opened.get_tensor(name)
        except (SafetensorError, TypeError, RuntimeError, ValueError) as error:  # a type or a size that torch has not
            raise ModelError(f"{self._file}: tensor {name} cannot be read ({reason_of(error)})") from error
        return tensor

    def _open(self) -> Any:  # safetensors leaves its handle untyped
        try:
            self._file.open("rb").close()  # safetensors takes a file that is closed to the user for a missing one
            return safe_open(self._file, framework="pt")
        except FileNotFoundError as error:
            raise missing(self._file) from error
        except (SafetensorError, OSError, ValueError) as error:
            raise corrupt(self._file, error) from error

"""A folder's weight files, mapped into memory: safetensors or pickles."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from triforce.arrays import DType
from triforce.checkpoint.file_errors import ADVICE, corrupt_file_error, missing_file_error, reason_of
from triforce.checkpoint.hub import read_json
from triforce.checkpoint.passed_trials import require_pass
from triforce.checkpoint.safetensors_file import stored_tensors
from triforce.errors import ModelError
from triforce.model.weights import Matrix
from triforce.sandbox import TrialError, TrialLimitError, TrialLimits

SECONDS, MEMORY = 10, 1 << 30
"""Limits of a trial, which is a read of the files in a sandbox: seconds of CPU time, and bytes of memory.

A trial may take `MEMORY` bytes on top of twice the files' size.
"""
MOST_HASHED = 256 << 20
"""Largest size in bytes of files whose digest is recorded. Hashing larger ones takes as long as their trial."""
PICKLE_TRIAL = "triforce.checkpoint.pickle_file:trial"
"""The trial's function. Its module imports torch, before limits count."""


def require_harmless(files: Sequence[Path]) -> None:
    """Raise ModelError for files that cannot be read within limits of time and memory.

    The files are read in a sandbox, unless the same bytes have passed before.
    """
    if find_spec("torch") is None:
        raise ModelError(f"{files[0]} is a pickle, which torch reads; pip install 'triforce[torch]', or {ADVICE}")
    size = sum(file.stat().st_size for file in files if file.is_file())
    limits = TrialLimits(cpu_seconds=SECONDS, memory_bytes=MEMORY + 2 * size, stack_bytes=8 << 20)
    sha256 = _digest(files) if size <= MOST_HASHED else ""
    try:
        require_pass(PICKLE_TRIAL, [str(file) for file in files], sha256, ("torch",), limits)
    except TrialLimitError as error:
        raise ModelError(f"{files[0].parent}: the weights are not opened: {error}; {ADVICE}") from None
    except TrialError as error:
        raise ModelError(str(error)) from None


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        if file.is_file():
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


class Archive(Protocol):
    """A weight file: tensors by name."""

    packed: bool
    """Whether tensors keep the types of the file, such as GGUF's quantized types, for kernels that read these types."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape from the file's header, without a read of its data."""

    def dtype(self, name: str) -> DType:
        """Return the name of a tensor's type from the file's header; of a packed matrix, that of its products' inputs.

        Types without host arrays have any other name, and no view.
        """

    def view(self, name: str) -> Matrix:
        """Return a tensor in its shape, as a view of the mapped file for the model's lifetime."""

    def transient_view(self, name: str) -> Matrix:
        """Return a short-lived view of a tensor, in its shape, to copy from.

        With some formats the mapped pages leave memory when the view is dropped.
        """


def open_archives(folder: Path) -> dict[str, Archive]:
    """Return the archive of each tensor in a folder by name. Safetensors take precedence over pickles.

    Raises ModelError if there are no weights, or naming the file that is missing, corrupt or unsafe.
    """
    if files := _files(folder, "model", ".safetensors"):
        return {name: archive for archive in map(Safetensors, files) for name in archive.names()}
    if files := _files(folder, "pytorch_model", ".bin"):
        require_harmless(files)
        from triforce.checkpoint.pickle_file import Pickle

        return {name: archive for archive in map(Pickle, files) for name in archive.names()}
    raise ModelError(
        f"{folder} has no weights: expected model.safetensors or pytorch_model.bin, or shards with their .index.json"
    )


def stamp(path: Path) -> str:
    """Return an identity of a folder's weights, or of one weight file, without a read of their data.

    It has each file's name, size and time of change; it is empty without weight files.
    """
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in (".safetensors", ".bin")]
    facts = [(file.name, file.stat()) for file in sorted(files) if file.exists()]
    return " ".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in facts)


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weight files, or an index of them."""
    return any(
        (folder / f"{name}{index}").exists()
        for name in ("model.safetensors", "pytorch_model.bin")
        for index in ("", ".index.json")
    )


def require_shape(archives: Mapping[str, Archive], name: str, shape: tuple[int, ...]) -> None:
    """Raise ModelError unless a tensor has the config's shape."""
    if (tensor_shape := archives[name].shape(name)) != shape:
        raise ModelError(f"tensor {name} has shape {list(tensor_shape)}, but the config asks for {list(shape)}")


def _files(folder: Path, stem: str, suffix: str) -> list[Path]:
    single = folder / f"{stem}{suffix}"
    index = folder / f"{stem}{suffix}.index.json"
    if single.exists() or not index.exists():
        return [single] if single.exists() else []
    shards = read_json(index).get("weight_map")
    # An index may name files of its own folder only.
    if not isinstance(shards, dict) or not shards or not all(Path(str(s)).name == s for s in shards.values()):
        raise ModelError(f"{index} has no valid weight_map; download it again")
    return [folder / shard for shard in sorted(set(shards.values()))]


class Safetensors:
    """Views of one mapping of a safetensors file, without a copy."""

    packed = False

    def __init__(self, file: Path) -> None:
        """Raises ModelError naming the file's fault."""
        self._file = file
        self._data = self._mapped()
        try:
            self._tensors = stored_tensors(self._data)
        except ValueError as error:
            raise corrupt_file_error(file, error) from error

    def names(self) -> Iterable[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> DType:
        return self._tensors[name].dtype

    def view(self, name: str) -> NDArray[Any]:
        return self._array(self._data, name)

    def transient_view(self, name: str) -> NDArray[Any]:
        # Pages of the shared mapping stay in memory as long as any of its views.
        return self._array(self._mapped(), name)

    def _array(self, data: mmap, name: str) -> NDArray[Any]:
        try:
            return self._tensors[name].array(data)
        except ValueError as error:  # the type has no arrays, or the file was cut since it was opened
            raise ModelError(f"{self._file}: tensor {name} cannot be read ({reason_of(error)})") from error

    def _mapped(self) -> mmap:
        try:
            with self._file.open("rb") as opened:
                return mmap(opened.fileno(), 0, access=ACCESS_READ)
        except FileNotFoundError as error:
            raise missing_file_error(self._file) from error
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise corrupt_file_error(self._file, error) from error


PREFIX = "language_model."


class TextTensors:
    """View of an archive, in which its tensors have their names without `PREFIX`."""

    packed = False

    def __init__(self, archive: Archive) -> None:
        self._archive = archive

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._archive.shape(f"{PREFIX}{name}")

    def dtype(self, name: str) -> DType:
        """Return the name of the tensor's type."""
        return self._archive.dtype(f"{PREFIX}{name}")

    def view(self, name: str) -> Matrix:
        """Return the tensor in its shape, as a view of the mapped file."""
        return self._archive.view(f"{PREFIX}{name}")

    def transient_view(self, name: str) -> Matrix:
        """Return a short-lived view of the tensor, in its shape."""
        return self._archive.transient_view(f"{PREFIX}{name}")


def text_part(archives: Mapping[str, Archive]) -> dict[str, Archive]:
    """Return archives by name of the text model's tensors. Tensors of other parts are left out."""
    return {name.removeprefix(PREFIX): TextTensors(archives[name]) for name in archives if name.startswith(PREFIX)}

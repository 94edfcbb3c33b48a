"""A folder's weight files, mapped into memory: safetensors or pickles."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from triforce.checkpoint.hub import read_json
from triforce.checkpoint.passed_trials import require_pass
from triforce.errors import ModelError, unreadable
from triforce.model.weights import Matrix
from triforce.sandbox import TrialError, TrialLimitError, TrialLimits

SECONDS, MEMORY = 10, 1 << 30
"""Limits of a trial: seconds of CPU time, and bytes on top of twice the files' size."""
MOST_HASHED = 256 << 20
"""Largest size in bytes of files whose digest is recorded. Hashing larger ones takes as long as their trial."""
ADVICE = "ask for a safetensors version of this model"


class Pickle:
    """A pickled state dict. No code in it runs: torch's loader builds tensors and plain containers only."""

    packed = False

    def __init__(self, file: Path) -> None:
        """Raises ModelError naming the file's fault. Call `require_harmless` first."""
        self._tensors = read_state_dict(file)

    def names(self) -> Iterable[str]:
        """Return the tensors' names."""
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def view(self, name: str) -> Tensor:
        """Return a tensor in its shape, as a view of the mapped file."""
        return self._tensors[name].detach()

    transient_view = view


def require_harmless(files: Sequence[Path]) -> None:
    """Raise ModelError for files that cannot be read within limits of time and memory.

    The files are read in a sandbox, unless the same bytes have passed before.
    """
    size = sum(file.stat().st_size for file in files if file.is_file())
    limits = TrialLimits(cpu_seconds=SECONDS, memory_bytes=MEMORY + 2 * size, stack_bytes=8 << 20)
    sha256 = _digest(files) if size <= MOST_HASHED else ""
    try:
        require_pass(f"{__name__}:trial", [str(file) for file in files], sha256, ("torch",), limits)
    except TrialLimitError as error:
        raise ModelError(f"{files[0].parent}: the weights are not opened: {error}; {ADVICE}") from None
    except TrialError as error:
        raise ModelError(str(error)) from None


def trial(files: list[str]) -> None:
    """Read pickles, inside the sandbox. Raises ModelError."""
    for file in files:
        read_state_dict(Path(file))


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """Return a pickle's tensors by name, in their shapes, as views of the file. Raises ModelError."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise missing_file_error(file) from error
    except pickle.UnpicklingError as error:
        raise ModelError(f"{file} holds more than tensors and is not opened, as it could run code; {ADVICE}") from error
    except MemoryError as error:
        raise ModelError(f"{file} takes more memory than a file of its size may; {ADVICE}") from error
    except Exception as error:  # a damaged zip or pickle raises nearly any type
        raise corrupt_file_error(file, error) from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ModelError(f"{file} is not a state dict of tensors; convert the model to safetensors")
    for name, tensor in tensors.items():
        if type(name) is not str:
            raise ModelError(f"{file} has {str(name)[:40]!r} for a tensor's name, which is no text; {ADVICE}")
        _require_plain(file, name, tensor)
    if sum(tensor.nbytes for tensor in tensors.values()) > 2 * file.stat().st_size:
        raise ModelError(f"{file}: its tensors take more than twice the bytes of the file; {ADVICE}")
    return tensors


def _require_plain(file: Path, name: str, tensor: Tensor) -> None:
    """Raise ModelError unless a tensor is strided, on the CPU, unquantized, and no larger than its storage."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.device.type != "cpu" or tensor.is_quantized:
        kind = f"{str(tensor.layout).removeprefix('torch.')} on {tensor.device.type}"
        raise ModelError(f"{file}: tensor {name} is no plain tensor of numbers ({kind}); {ADVICE}")
    if prod(tensor.shape) * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise ModelError(f"{file}: tensor {name} has more numbers than the file; {ADVICE}")


def missing_file_error(file: Path) -> ModelError:
    """Return the error for a missing file that an index names."""
    return ModelError(f"{file} is missing, though the index of shards names it; download it again")


def corrupt_file_error(file: Path, error: Exception) -> ModelError:
    """Return the error for a file that its library cannot read."""
    if isinstance(error, PermissionError):
        return unreadable(file, error)
    return ModelError(f"{file} is corrupt, truncated or a Git LFS pointer ({reason_of(error)}); download it again")


def reason_of(error: Exception) -> str:
    """Return the first line of a library's error message; the error's type if the message is empty."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


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
    """Whether its tensors keep their own types, for kernels that read these."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape from the file's header, without a read of its data."""

    def view(self, name: str) -> Matrix:
        """Return a tensor in its shape, as a view of the mapped file for the model's lifetime."""

    def transient_view(self, name: str) -> Matrix:
        """Return a short-lived view, in its shape, to copy from. With some formats, its pages leave memory with it."""


def open_archives(folder: Path) -> dict[str, Archive]:
    """Return the archive of each tensor in a folder by name. Safetensors precede pickles.

    Raises ModelError if there are no weights, or naming the file that is missing, corrupt or unsafe.
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
        self._file = file
        self._mapping = self._open()

    def names(self) -> Iterable[str]:
        return list(self._mapping.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._mapping.get_slice(name).get_shape())

    def view(self, name: str) -> Tensor:
        return self._tensor(self._mapping, name)

    def transient_view(self, name: str) -> Tensor:
        with (
            self._open() as temporary_mapping
        ):  # pages of the shared mapping stay in memory as long as any of its views
            return self._tensor(temporary_mapping, name)

    def _tensor(self, opened: Any, name: str) -> Tensor:
        try:
            tensor: Tensor = opened.get_tensor(name)
        except (SafetensorError, TypeError, RuntimeError, ValueError) as error:  # a dtype or a size that torch lacks
            raise ModelError(f"{self._file}: tensor {name} cannot be read ({reason_of(error)})") from error
        return tensor

    def _open(self) -> Any:  # safetensors leaves its handle untyped
        try:
            self._file.open("rb").close()  # safetensors reports an unreadable file as missing
            return safe_open(self._file, framework="pt")
        except FileNotFoundError as error:
            raise missing_file_error(self._file) from error
        except (SafetensorError, OSError, ValueError) as error:
            raise corrupt_file_error(self._file, error) from error


PREFIX = "language_model."


class TextTensors:
    """View of an archive whose tensor names lack `PREFIX`."""

    packed = False

    def __init__(self, archive: Archive) -> None:
        self._archive = archive

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._archive.shape(f"{PREFIX}{name}")

    def view(self, name: str) -> Matrix:
        """Return the tensor in its shape, as a view of the mapped file."""
        return self._archive.view(f"{PREFIX}{name}")

    def transient_view(self, name: str) -> Matrix:
        """Return a short-lived view of the tensor, in its shape."""
        return self._archive.transient_view(f"{PREFIX}{name}")


def text_part(archives: Mapping[str, Archive]) -> dict[str, Archive]:
    """Return archives by name of the text model's tensors. Tensors of other parts are left out."""
    return {name.removeprefix(PREFIX): TextTensors(archives[name]) for name in archives if name.startswith(PREFIX)}

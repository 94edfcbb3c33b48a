"""Pickled weight files, mapped into memory by torch's weights-only loader, once they have passed a trial.

That loader runs no code, but a pickle may ask it for any amount of memory and time.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from triforce.checkpoint.passed_trials import require_pass
from triforce.checkpoint.unreadable_file import unreadable
from triforce.errors import ModelError
from triforce.sandbox import TrialError, TrialLimitError, TrialLimits

SECONDS, MEMORY = 10, 1 << 30
"""Limits of a trial: of CPU time, and of bytes on top of the files' own."""
MOST_HASHED = 256 << 20
"""Bytes of files that are known again by their digest. A digest of larger ones takes as long as their trial."""
ADVICE = "ask for a safetensors version of this model"


class Pickle:
    """A pickled state dict. Nothing in it is run: torch's loader builds tensors and plain containers only."""

    packed = False

    def __init__(self, file: Path) -> None:
        """Raises ModelError naming what is wrong with the file. `require_harmless` comes first."""
        self._tensors = read_state_dict(file)

    def names(self) -> Iterable[str]:
        """Return the names of its tensors."""
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def view(self, name: str) -> Tensor:
        """Return a tensor, in its shape, as it lies in the mapped file."""
        return self._tensors[name].detach()

    glance = view


def require_harmless(files: Sequence[Path]) -> None:
    """Raise ModelError for files that cannot be read, or take more time or memory than limits allow.

    They are read in a sandbox first, unless the same bytes have passed before.
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
    """Read files. Raises ModelError."""
    for file in files:
        read_state_dict(Path(file))


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name; views of the file. Raises ModelError."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise missing(file) from error
    except pickle.UnpicklingError as error:
        raise ModelError(f"{file} holds more than tensors and is not opened, as it could run code; {ADVICE}") from error
    except MemoryError as error:
        raise ModelError(f"{file} takes more memory than a file of its size may; {ADVICE}") from error
    except Exception as error:  # a damaged zip or pickle surfaces as nearly anything
        raise corrupt(file, error) from error
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
    """Raise ModelError unless a tensor is numbers that lie in the file, each of them once."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.device.type != "cpu" or tensor.is_quantized:
        kind = f"{str(tensor.layout).removeprefix('torch.')} on {tensor.device.type}"
        raise ModelError(f"{file}: tensor {name} is no plain tensor of numbers ({kind}); {ADVICE}")
    if prod(tensor.shape) * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise ModelError(f"{file}: tensor {name} has more numbers than the file; {ADVICE}")


def missing(file: Path) -> ModelError:
    """Return the error for a file that an index names."""
    return ModelError(f"{file} is missing, though the index of shards names it; download it again")


def corrupt(file: Path, error: Exception) -> ModelError:
    """Return the error for a file that its library cannot read."""
    if isinstance(error, PermissionError):
        return unreadable(file, error)
    return ModelError(f"{file} is corrupt, truncated or a Git LFS pointer ({reason_of(error)}); download it again")


def reason_of(error: Exception) -> str:
    """Return the first line of what a library says."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        if file.is_file():
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()

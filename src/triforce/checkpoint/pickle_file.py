"""Pickled state dicts as archives of host arrays. Torch reads them."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from triforce.arrays import DType, to_host
from triforce.checkpoint.file_errors import ADVICE, corrupt_file_error, missing_file_error
from triforce.errors import ModelError


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

    def dtype(self, name: str) -> DType:
        """Return the name of a tensor's type."""
        return str(self._tensors[name].dtype).removeprefix("torch.")

    def view(self, name: str) -> NDArray[Any]:
        """Return a tensor in its shape, as a view of the mapped file."""
        return to_host(self._tensors[name])

    transient_view = view


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
    """Raise ModelError unless a tensor is strided, on the CPU, unquantized, and no larger than its storage.

    Views that negate the numbers of their storage have no host arrays.
    """
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_neg():
        kind = f"{str(tensor.layout).removeprefix('torch.')} on {tensor.device.type}"
        raise ModelError(f"{file}: tensor {name} is no plain tensor of numbers ({kind}); {ADVICE}")
    if prod(tensor.shape) * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise ModelError(f"{file}: tensor {name} has more numbers than the file; {ADVICE}")

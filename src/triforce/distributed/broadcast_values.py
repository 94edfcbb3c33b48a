"""Values that rank 0 broadcasts, as bytes. Reading them runs no foreign code, even if an attacker wrote them.

The format is that of pickle. Beside Python's own containers, numbers and texts, only numbers of numpy, and dataclasses
and enumerations of triforce are written and read.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any

import numpy as np

PACKAGE = "triforce."


def dump(value: object) -> bytes:
    """Return a value as bytes. Raises PicklingError for a value that `load` would refuse."""
    stream = io.BytesIO()
    _ValueWriter(stream, pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


def load(data: bytes | bytearray) -> Any:
    """Return the value of bytes. Raises UnpicklingError for types other than the module's docstring names."""
    return _ValueReader(io.BytesIO(data)).load()


def _is_readable(kind: object) -> bool:
    return isinstance(kind, type) and kind.__module__.startswith(PACKAGE) and (
        is_dataclass(kind) or issubclass(kind, Enum)
    )  # fmt: skip


def numpy_number(dtype: str, number: float) -> Any:
    """Return a number as a scalar of numpy. Raises UnpicklingError for a type of other values."""
    if (scalar := np.dtype(dtype)).kind not in "biuf":
        raise pickle.UnpicklingError(f"{dtype} is no type of numbers")
    return scalar.type(number)


class _ValueWriter(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Write members of enumerations as calls with their value, as not every Python version does."""
        if value is numpy_number:
            return NotImplemented
        if isinstance(value, np.bool_ | np.integer | np.floating):
            return numpy_number, (value.dtype.str, value.item())
        if isinstance(value, Enum) and _is_readable(type(value)):
            return type(value), (value.value,)
        if isinstance(value, type):
            if not _is_readable(value):
                raise pickle.PicklingError(f"{value.__module__}.{value.__qualname__} is not broadcast")
        elif not _is_readable(type(value)):
            raise pickle.PicklingError(f"a value of type {type(value).__name__} is not broadcast")
        return NotImplemented


class _ValueReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the dataclass or enumeration of this name. Raises UnpicklingError for anything else."""
        if (module, name) == (__name__, numpy_number.__name__):
            return numpy_number
        kind = getattr(import_module(module), name, None) if module.startswith(PACKAGE) else None
        if not _is_readable(kind) or kind.__module__ != module:
            raise pickle.UnpicklingError(f"{module}.{name} is not a value that ranks broadcast")
        return kind

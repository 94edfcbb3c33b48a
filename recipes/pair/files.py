"""Files that are written completely or not at all, even if the run is killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch


def _commit(partial: Path, path: Path) -> None:
    os.replace(partial, path)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _commit(partial, path)


def write_array(path: Path, array: np.ndarray) -> None:
    """Write a .npy file."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as stream:
        np.save(stream, array)
    _commit(partial, path)


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write a torch checkpoint."""
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    _commit(partial, path)


def read_state(path: Path) -> dict[str, Any]:
    """Return a checkpoint of `write_state`, on the CPU."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state

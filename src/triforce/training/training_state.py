"""TrainingState: what a training is made of, in a file that is whole or absent, so that it goes on where it was cut."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triforce.checkpoint.feature_draft_writer import write_whole
from triforce.errors import ModelError

FILE = "training.pt"


@dataclass
class TrainingState:
    """Weights by field, the state of each optimizer, and how far it has come.

    facts: what must be the same when it goes on. episode: the number of the next one. seconds: those spent. history:
    held-out shares, with the updates and seconds of each look.
    """

    facts: dict[str, Any]
    weights: dict[str, Tensor]
    tokens_M: Tensor
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    episode: int = 0
    updates: int = 0
    tokens: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write the file of a folder. Raises RequestError where there is no room; the file is as it was then."""
        data = io.BytesIO()
        torch.save({name: getattr(self, name) for name in self.__dataclass_fields__}, data)
        write_whole(folder / FILE, data.getbuffer())

    @staticmethod
    def load(folder: Path, facts: dict[str, Any]) -> TrainingState | None:
        """Read the file of a folder; None where there is none. Raises ModelError for a broken one, or other facts."""
        file = folder / FILE
        if not file.exists():
            return None
        try:
            state = TrainingState(**torch.load(file, map_location="cpu", weights_only=True))
        except Exception as error:  # a damaged file surfaces as nearly anything
            raise ModelError(f"{file} is damaged; remove it to begin anew") from error
        if state.facts != facts:
            changed = ", ".join(name for name in facts if state.facts.get(name) != facts[name])
            raise ModelError(f"{file} is a training with another {changed}; name another folder, or remove the file")
        return state

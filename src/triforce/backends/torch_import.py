"""The import of torch, which every command waits for."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from types import FrameType


def import_torch() -> None:
    """Import torch so that the garbage collector does not look at it, now or later.

    Its 170,000 objects stay until the process ends. Collections while they are made take a sixth of the import's time,
    and the one at the end of the process as much again. Frames of functions that have ended go: one that refers to
    itself, as one of torch.fx does, would keep those of all callers, and the models that they hold later.
    """
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        _clear_frames()
        gc.freeze()
        gc.enable()


def _clear_frames() -> None:
    """Clear frames of functions of torch that have ended."""
    for frame in [tracked for tracked in gc.get_objects() if type(tracked) is FrameType]:
        if str(frame.f_globals.get("__name__", "")).startswith("torch"):
            with suppress(RuntimeError):  # it runs: torch is imported from there
                frame.clear()

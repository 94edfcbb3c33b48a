"""Import of torch, which every command waits for."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from types import FrameType


def import_torch() -> None:
    """Import torch outside the garbage collector, which skips its objects then and later.

    The 170,000 objects of torch stay until the process ends. Collections during the import take a sixth of its time,
    and the collection at the end of the process as much again. Frames of functions that have ended are cleared: a frame
    that refers to itself, as one of torch.fx does, would keep the frames of all callers, and later their models, alive.
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
    """Clear the frames of torch's functions that have ended."""
    for frame in [tracked for tracked in gc.get_objects() if type(tracked) is FrameType]:
        if str(frame.f_globals.get("__name__", "")).startswith("torch"):
            with suppress(RuntimeError):  # the frame still runs: it imports torch
                frame.clear()

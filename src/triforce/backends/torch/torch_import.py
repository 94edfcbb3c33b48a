"""Import of torch, which takes seconds: commands that compute with native kernels go without it."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from types import FrameType


def import_torch() -> None:
    """Import torch with the garbage collector off, and exempt torch's objects from later collections.

    Torch's objects, more than a hundred thousand, stay until the process ends; collecting them takes time during the
    import and again at the end. Frames of functions that have ended are cleared: a frame that refers to itself, such as
    one of torch.fx, would keep the frames of all its callers alive, and later their models.
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

"""The import of torch, which every command waits for."""

from __future__ import annotations

import gc
import sys


def import_torch() -> None:
    """Import torch so that the garbage collector does not look at it, now or later.

    Its 170,000 objects stay until the process ends. Collections while they are made take a sixth of the import's time,
    and the one at the end of the process as much again.
    """
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()

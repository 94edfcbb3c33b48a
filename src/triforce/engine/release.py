"""Return of freed memory to the system: allocators keep it for the next ones to ask."""

from __future__ import annotations

import ctypes
import sys


def trim_heap() -> None:
    """Give free memory of the C heap back, where the system's library can (glibc)."""
    if not sys.is_finalizing():
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

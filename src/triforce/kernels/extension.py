"""The native extension, where it was built and is wanted: else `native` is None, and torch does everything.

The environment variable TRIFORCE_KERNELS names the kernels to use: `torch`, or one of the extension's instruction-set
levels (`portable`, `avx2`, `avx512`, `avx512vnni`, `avx512bf16`). Without it, the best that this CPU can run.
Bits differ between levels.
"""

from __future__ import annotations

import os
from types import ModuleType

from triforce.errors import TriforceError

VARIABLE = "TRIFORCE_KERNELS"


def load(wanted: str) -> tuple[ModuleType | None, str]:
    """The extension, or None and why there is none. Raises TriforceError if `wanted` cannot be had; "" is the best."""
    if wanted == "torch":
        return None, ""
    try:
        from triforce.kernels import _native
    except ImportError as error:
        reason = f"they were not built; installing triforce where there is a C++ compiler builds them ({error})"
        if wanted:
            raise TriforceError(f"{VARIABLE}={wanted} asks for native kernels, but {reason}") from error
        return None, reason
    try:
        if wanted:
            _native.use(wanted)
    except ValueError as error:
        raise TriforceError(f"{VARIABLE}={wanted}: {error}. There is also torch") from error
    return _native, ""


native, missing = load(os.environ.get(VARIABLE, ""))
"""`missing` says why there is none, to a user who has not asked for that."""

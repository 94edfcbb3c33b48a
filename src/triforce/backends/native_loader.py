"""Choice of kernels, and the native extension: `native` is None where it was not built or is not wanted.

The environment variable TRIFORCE_KERNELS names the kernels to use: `torch`, `triton`, or one of the extension's
instruction-set levels (`portable`, `avx2`, `avxvnni`, `avx512`, `avx512vnni`, `avx512bf16`). Without it, Triton's on a
CUDA device where Triton is installed, and on a CPU the best that it can run. Bits differ between levels.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import ModuleType

import torch

from triforce.errors import TriforceError

VARIABLE = "TRIFORCE_KERNELS"


def load(wanted: str) -> tuple[ModuleType | None, str]:
    """The extension, or None and why there is none. Raises TriforceError if `wanted` cannot be had; "" is the best."""
    if wanted in ("torch", "triton"):
        return None, ""
    try:
        from triforce.backends.cpu import _native
    except ImportError as error:
        reason = f"they were not built; installing triforce where there is a C++ compiler builds them ({error})"
        if wanted:
            raise TriforceError(f"{VARIABLE}={wanted} asks for native kernels, but {reason}") from error
        return None, reason
    try:
        if wanted:
            _native.use(wanted)
    except ValueError as error:
        raise TriforceError(f"{VARIABLE}={wanted}: {error}. There are also torch and triton") from error
    return _native, ""


def suits_triton(wanted: str, device: torch.device) -> bool:
    """Whether Triton's kernels are to be used on a device.

    Raises TriforceError where they were asked for by name and cannot be had.
    """
    if wanted != "triton" and (wanted or device.type != "cuda"):
        return False
    if not _installed():
        if wanted:
            raise TriforceError(f"{VARIABLE}={wanted}, but Triton is not installed; pip install 'triforce[gpu]'")
        return False
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return True
    raise TriforceError(
        f"{VARIABLE}={wanted}, but these kernels are for CUDA devices and this is {device}. Leave {VARIABLE} out, name "
        "a CUDA device, or set TRITON_INTERPRET=1 to have Triton interpret them, which is for tests and very slow"
    )


@contextmanager
def torch_alone() -> Iterator[None]:
    """Let torch compute with what is made meanwhile: the path that other kernels are compared with."""
    global native, wanted
    before = native, wanted
    native, wanted = None, "torch"
    try:
        yield
    finally:
        native, wanted = before


def usable_cpus() -> int:
    """The CPUs that this process may use: its affinity, and its control groups' quota if the extension was built."""
    try:
        from triforce.backends.cpu import _native
    except ImportError:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _native.usable_cpus()


def use_threads(count: int) -> None:
    """Set the threads of this process, in kernels and in torch: what shares a machine shares its processors."""
    torch.set_num_threads(count)
    if native is not None:
        native.set_threads(count)


def build() -> str:
    """Return what tells one build of the kernels, at its level, from others, whose bits may differ."""
    if native is None:
        return f"torch {torch.__version__}"
    digest = blake2b(Path(str(native.__file__)).read_bytes(), digest_size=4).hexdigest()
    return f"{native.level()} {digest}, torch {torch.__version__}"


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


wanted = os.environ.get(VARIABLE, "")
native, missing = load(wanted)
"""`missing` says why there is none, to a user who has not asked for that."""

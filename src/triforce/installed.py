"""Versions of installed packages, and whether a GPU can be used. torch is imported only beside the driver of a GPU."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

GPU_DEVICE_FILES = ("nvidiactl", "nvidia0", "nvhost-gpu", "dxg", "kfd")
"""Files of /dev: each GPU driver makes one of them (NVIDIA's, its driver of embedded boards, WSL's, AMD's)."""


@cache
def version_of(package: str) -> str:
    """Return the version of a package; "" if it is not installed, as when triforce runs from a source folder."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def has_cuda() -> bool:
    """Return whether there is a CUDA device that torch can use. torch is imported only beside the driver of a GPU."""
    has_driver = any((Path("/dev") / name).exists() for name in GPU_DEVICE_FILES)
    if not has_driver or find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())

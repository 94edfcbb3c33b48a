"""Path of the file that keeps learnt costs for the next process: one for each machine, kernels and models."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from triforce.backends import native_loader


def costs_path(models: list[str], device: torch.device, dtype: torch.dtype) -> Path | None:
    """The path of the file for some models on a device of this machine, in the cache folder of XDG.

    Its name has the device, the level of the kernels and the dtype; its digest these, the version, the machine, its
    threads and the models. None for a user without a home folder.
    """
    native = native_loader.native if device.type == "cpu" else None
    level, threads = (native.level(), native.threads()) if native else ("torch", torch.get_num_threads())
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    names = [kind, level, str(dtype).removeprefix("torch.")]
    about = [*models, *names, _version(), platform.node(), platform.machine(), str(threads)]
    key = hashlib.sha256("\n".join(about).encode()).hexdigest()[:16]
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return cache / "triforce" / f"costs-{re.sub(r'[^a-z0-9]+', '-', '-'.join(names).lower())}-{key}.json"


def _version() -> str:
    """The installed version: kernels of another one may be faster, and its file may have another form."""
    try:
        return version("triforce")
    except PackageNotFoundError:  # run from a folder
        return ""

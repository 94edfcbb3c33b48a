"""Provenance of figures: the machine, the level of its kernels, the commit, and the version of the benches."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from triforce.backends import native_loader
from triforce.planner.cost_model import kernel_level

if TYPE_CHECKING:
    from triforce.bench.roofline import Roofline

VERSION: int = 2
"""Version of the benches. It is raised when what a figure counts changes, so that figures of two versions are not
compared. Rows from before it was written are "old bench": synthetic decoding left out its first step and cut its last
verification short, and some rows were made by scripts."""

FIELDS = ("machine", "level", "commit", "bench")
"""Fields that each row of results has, by itself or by the head of its file."""

ROOT = Path(__file__).resolve().parents[3]
MEASURED = ("src", "csrc", "benchmarks", "recipes", "pyproject.toml", "CMakeLists.txt", ":!benchmarks/results")
"""Paths that figures depend on, in a checkout."""


def provenance(device: torch.device | None = None) -> dict[str, Any]:
    """Return the source of figures that are measured on a device, the processor if None."""
    if device is None or device.type != "cuda":
        found = machine(), kernel_level(torch.device("cpu"))
    else:
        major, minor = torch.cuda.get_device_capability(device)
        found = torch.cuda.get_device_name(device), f"sm_{major}{minor}"
    return dict(zip(FIELDS, (*found, commit(), VERSION), strict=True))


@cache
def commit() -> str | None:
    """Return the commit of this checkout as it was at the first call, with `+` if files differ from it.

    None where this is no checkout, as after an installation from a wheel.
    """
    place = _git("rev-parse", "--show-toplevel", "HEAD").split("\n")
    if Path(place[0]) != ROOT or len(place) < 2:
        return None
    return place[1][:8] + ("+" if _git("status", "--porcelain", "--untracked-files=all", "--", *MEASURED) else "")


def _git(*arguments: str) -> str:
    """Return what git prints, nothing where it fails or is missing."""
    try:
        command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.strip()


@cache
def machine() -> str:
    """Describe this machine: processor, cores, level of the kernels, torch, and what it reads and computes a second."""
    model = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    level = native_loader.native.level() if native_loader.native else "torch"
    return (
        f"{model or platform.machine()}, {native_loader.usable_cpus()} cores, kernels {level}, "
        f"torch {torch.__version__}, {measured()}"
    )


@cache
def measured() -> Roofline:
    """Return what this machine reads and computes a second, measured once."""
    from triforce.bench import roofline

    return roofline.measure()


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []

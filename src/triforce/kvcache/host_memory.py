"""Free memory of the host, within the limits of this process's control groups (Linux cgroups, versions 1 and 2)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def free_memory(root: Path = ROOT) -> int:
    """Return the bytes that this process can still allocate; 0 if the system does not say.

    A container's limit counts as well as the host's free memory. root: the root of the file system.
    """
    return min([_free_host_memory(root), *_free_cgroup_memory(root)])


def _free_host_memory(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def _free_cgroup_memory(root: Path) -> Iterator[int]:
    """Yield the bytes below the limit of each control group that has one. Inactive pages of files count as free.

    Memory limits hold for a group and for all groups above it. A container may see its own group as the root, under a
    path of the host that does not exist in it.
    """
    for folder, (limit_file, usage_file, inactive_field) in _cgroup_folders(root):
        try:
            limit = int((folder / limit_file).read_text())  # "max" is no limit
            usage = int((folder / usage_file).read_text())
            stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield max(limit - usage + int(stats[inactive_field]), 0)
        except (OSError, ValueError, KeyError):
            continue


def _cgroup_folders(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folders of this process's groups and their parents, with names of limit, usage and inactive pages."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        (_, controllers, group) = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
            files = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = mount / group.lstrip("/")
        for path in (folder, *folder.parents):
            yield path, files
            if path == mount:
                break

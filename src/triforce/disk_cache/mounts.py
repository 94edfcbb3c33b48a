"""Kinds of file systems, by their names in Linux."""

from __future__ import annotations

from pathlib import Path

NETWORK = ("nfs", "cifs", "smb", "fuse")
"""Beginnings of names whose locks, renames or owners may not be what they are on a local disk."""


def file_system(descriptor: int) -> str:
    """Return the name of the file system that an open file lies on, such as `ext4`; "" where that cannot be known."""
    try:
        facts = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    mount = dict(line.partition(":")[::2] for line in facts.splitlines()).get("mnt_id", "").strip()
    mounted = (line.partition(" - ") for line in mounts)
    return next((kind.split()[0] for head, _, kind in mounted if head.split()[0] == mount), "")

"""Free memory is that of the host, or what the limits of control groups leave of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from triforce.kvcache.host_memory import free_memory

HOST_FREE = 8000 * 1024
VERSION_2 = {"memory.current": "5000", "memory.stat": "anon 4000\ninactive_file 700\n"}
VERSION_1 = {"memory.usage_in_bytes": "5000", "memory.stat": "inactive_file 1\ntotal_inactive_file 300\n"}


def file_system(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Write a file system with 8,000 KiB of free memory, the groups of a process, and files of groups by path."""
    texts = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n", "proc/self/cgroup": groups}
    for name, text in (texts | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def under(folder: str, limits: dict[str, str]) -> dict[str, str]:
    return {f"{folder}{name}": text for name, text in limits.items()}


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("", {}, HOST_FREE),
        ("0::/\n", under("", VERSION_2 | {"memory.max": "max\n"}), HOST_FREE),
        ("0::/\n", under("", VERSION_2 | {"memory.max": "6000\n"}), 1700),
        (
            "0::/a/b\n",
            under("a/b/", VERSION_2 | {"memory.max": "max"}) | under("a/", VERSION_2 | {"memory.max": "5500"}),
            1200,
        ),
        ("0::/of/the/host\n", under("", VERSION_2 | {"memory.max": "4000"}), 0),
        ("0::/\n", {"memory.max": "6000"}, HOST_FREE),
        ("3:cpu:/x\n4:hugetlb,memory:/x\n", under("memory/x/", VERSION_1 | {"memory.limit_in_bytes": "5100"}), 400),
        ("4:memory:/x\n", under("memory/", VERSION_1 | {"memory.limit_in_bytes": str(1 << 62)}), HOST_FREE),
    ],
    ids=[
        "none",
        "no limit",
        "limit",
        "limit above",
        "path of the host",
        "no usage",
        "version 1",
        "version 1, no limit",
    ],
)
def test_free_memory_is_within_limits_of_groups(tmp_path: Path, groups: str, files: dict[str, str], free: int) -> None:
    assert free_memory(file_system(tmp_path, groups, files)) == free


def test_free_memory_of_this_machine_is_positive() -> None:
    assert free_memory() > 0

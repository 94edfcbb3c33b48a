"""The CPUs that a process may use: quotas of control groups of both versions, read from trees of files in a folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.paged_kv import native
from triforce.backends import dispatch

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)

CONTAINER = "4:cpu,cpuacct:/docker/1f\n3:cpuset:/docker/1f\n"
SLICES = "0::/user.slice/app.scope\n"
NOTHING = "max 100000"


def quota(root: Path, groups: str, **files: str) -> int | None:
    """Return the quota of a process in these groups, with these files under /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return native.cpu_quota(str(root))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("200000 100000", 2), ("200001 100000", 3), ("150000 100000", 2), ("1000 100000", 1), ("25000 50000", 1),
        ("max 100000", None), ("", None), ("nonsense", None), ("100000", None), ("0 100000", None),
        ("100000 0", None), ("-1 100000", None), ("9223372036854775807 1", None), ("99999999999999999999 1", None),
    ],
)  # fmt: skip
def test_quota_of_version_2_rounds_up(tmp_path: Path, text: str, cpus: int | None) -> None:
    assert quota(tmp_path, "0::/\n", **{"cpu.max": text}) == cpus


@pytest.mark.parametrize(
    ("group", "parent", "top", "cpus"),
    [
        (NOTHING, NOTHING, NOTHING, None), ("300000 100000", NOTHING, NOTHING, 3),
        (NOTHING, "300000 100000", NOTHING, 3), (NOTHING, NOTHING, "300000 100000", 3),
        ("500000 100000", "400000 100000", "700000 100000", 4),
        ("200000 100000", "400000 100000", "700000 100000", 2),
    ],
)  # fmt: skip
def test_quota_is_least_of_group_and_parents(
    tmp_path: Path, group: str, parent: str, top: str, cpus: int | None
) -> None:
    files = {"user.slice/app.scope/cpu.max": group, "user.slice/cpu.max": parent, "cpu.max": top}
    beside = {"user.slice/other.scope/cpu.max": "100000 100000", "app.scope/cpu.max": "100000 100000"}
    assert quota(tmp_path, SLICES, **files, **beside) == cpus


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize("folder", ["/docker/1f/", "/docker/", "/"])
def test_quota_of_version_1(tmp_path: Path, mount: str, folder: str) -> None:
    files = {f"{mount}{folder}cpu.cfs_quota_us": "250000", f"{mount}{folder}cpu.cfs_period_us": "100000"}
    assert quota(tmp_path, CONTAINER, **files) == 3


def test_quota_of_version_1_without_limit(tmp_path: Path) -> None:
    files = {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}
    cpuset_files = {"cpuset/docker/1f/cpu.cfs_quota_us": "100000", "cpuset/docker/1f/cpu.cfs_period_us": "100000"}
    assert quota(tmp_path, CONTAINER, **files, **cpuset_files) is None


def test_quota_of_both_versions_is_the_least(tmp_path: Path) -> None:
    old = {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}
    assert quota(tmp_path, CONTAINER + SLICES, **old, **{"unified/user.slice/cpu.max": "300000 100000"}) == 3


@pytest.mark.parametrize("groups", ["", "0::", "nonsense\n", "0:/\n", "::\n", "0:cpu\n", "\n\n", "0::up\n"])
def test_broken_list_of_groups_is_no_limit(tmp_path: Path, groups: str) -> None:
    assert quota(tmp_path, groups, **{"cpu.max": "100000 100000", "cpu/cpu.cfs_quota_us": "1"}) is None


def test_group_outside_of_mount_has_limit_of_mount(tmp_path: Path) -> None:
    (tmp_path / "sys/fs/other").mkdir(parents=True)
    (tmp_path / "sys/fs/other/cpu.max").write_text("100000 100000")
    assert quota(tmp_path, "0::/../other\n", **{"cpu.max": "500000 100000"}) == 5


def test_no_files_are_no_limit(tmp_path: Path) -> None:
    assert native.cpu_quota(str(tmp_path)) is None


def test_usable_cpus_without_extension_are_those_of_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triforce.backends.cpu._native", None)
    monkeypatch.delattr("triforce.backends.cpu._native", raising=False)
    if hasattr(os, "sched_getaffinity"):
        assert dispatch.usable_cpus() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert dispatch.usable_cpus() == 1

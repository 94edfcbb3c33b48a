"""A disk cache on a full disk: a small file system in memory, mounted for one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.disk_llm import WHOLE

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "helpers" / "processes" / "full_disk.py"
MOUNTED = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
DISK = 'mount -t tmpfs -o size=2m,mode=700 none "$0" && exec "$@"'


def mounted(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that has a disk of 2 MiB at a folder."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "src")))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*MOUNTED, DISK, folder, *command], env=environment, capture_output=True, text=True)


def test_full_disk_costs_entries_and_no_answer(disk_pair: Path, tmp_path: Path) -> None:
    try:
        if mounted(tmp_path, "true").returncode:
            pytest.skip("nothing may be mounted here")
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    done = mounted(tmp_path, sys.executable, str(SCRIPT), str(disk_pair), str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["same"] and report["found"] == WHOLE
    assert 1 <= len(report["logged"]) <= 3 and all("No space left" in line for line in report["logged"])
    assert report["left"] == ["secret", "state"]

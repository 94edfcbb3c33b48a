"""Resume an interrupted test run: `python -m pytest -p tests.helpers.resumed_run --resume FILE`.

FILE holds a digest of the tested files, and the tests that have passed since, one per line. They are skipped as long
as the digest is the same. If all have passed FILE is removed, so that the next run starts from the beginning.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from triforce.backends import dispatch

ROOT = Path(__file__).parents[2]
FOLDERS = ["src", "csrc", "tests", "benchmarks", "scripts", "docs", "examples"]
"""Folders that tests read."""
UNTESTED = {".pyc", ".so"}


def digest(folders: Sequence[str] = FOLDERS) -> str:
    """Return a digest of the files in `folders`, of Python, torch and the kernels, which differ between machines."""
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix not in UNTESTED]
    files += [path for path in ROOT.iterdir() if path.suffix in {".md", ".toml", ".txt"} or path.name == "Makefile"]
    checksum = hashlib.sha256(f"{sys.version} {dispatch.build_identity()}".encode())
    for path in sorted(path for path in files if path.is_file()):
        checksum.update(f"{path.relative_to(ROOT)}\n{path.stat().st_size}\n".encode() + path.read_bytes())
    return checksum.hexdigest()


class ResumedRun:
    """Skips tests that the file lists; the controlling process adds passed tests."""

    def __init__(self, file: Path, *, writes: bool) -> None:
        self._file = file
        self._writes = writes
        self._called: set[str] = set()
        tested = digest()
        recorded_digest, *passed = file.read_text().splitlines() if file.exists() else [""]
        self._passed = set(passed) if recorded_digest == tested else set()
        if writes and recorded_digest != tested:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(tested + "\n")

    def pytest_report_header(self) -> str:
        return f"resumed: {len(self._passed)} tests have passed before ({self._file})"

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if item.nodeid in self._passed]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in self._passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._called.add(report.nodeid)
        if self._writes and report.when == "teardown" and report.passed and report.nodeid in self._called:
            with self._file.open("a") as file:
                file.write(report.nodeid + "\n")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self._writes and exitstatus == 0:
            self._file.unlink()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--resume", metavar="FILE", type=Path, help="leave out what has passed since FILE was begun")


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("resume"):
        config.pluginmanager.register(ResumedRun(file, writes=not hasattr(config, "workerinput")))

"""A run of tests that was cut off goes on behind what has passed, on the same files alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.resumed_run import ROOT, digest

TESTS = """
import pathlib

def test_one(): pass
def test_two(): pass
def test_three(): assert pathlib.Path(__file__).with_name("mended").exists()
"""


@pytest.mark.slow  # it starts pytest ten times
@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_run_leaves_out_what_passed_and_ends_with_all(tmp_path: Path, workers: int) -> None:
    tests = tmp_path / "test_few.py"
    passed_file = tmp_path / "kept" / "passed"
    tests.write_text(TESTS)

    def run() -> str:
        options = [
            "-p",
            "tests.helpers.resumed_run",
            "--resume",
            str(passed_file),
            "-p",
            "no:cacheprovider",
            "-n",
            str(workers),
        ]
        command = [sys.executable, "-m", "pytest", "-q", *options, str(tests)]
        return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout

    assert "1 failed, 2 passed" in run()
    assert passed_file.read_text().splitlines()[0] == digest() and len(passed_file.read_text().splitlines()) == 3
    assert "1 failed" in (again := run()) and "passed" not in again
    passed_file.write_text(passed_file.read_text().replace(digest(), "other files"))
    assert "1 failed, 2 passed" in run()
    (tmp_path / "mended").touch()
    assert "1 passed" in run() and not passed_file.exists()
    assert "3 passed" in run()

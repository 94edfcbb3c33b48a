"""`.ci/run`: a real model is fetched before all is checked; one with wrong bytes ends it, one out of reach does not."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.extras import needs_torch
from tests.helpers.fake_hub import ended, started

ROOT = Path(__file__).parents[1]
UNTESTED = "REAL MODEL NOT TESTED"


def script(file: Path, code: int, on: str) -> None:
    """Write a program that says how it was called, and ends with a code where its first argument is `on`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'#!/bin/sh\necho "$(basename "$0") $*"\ntest "$1" != {on} || exit {code}\n')
    file.chmod(0o755)


@pytest.mark.parametrize(
    ("fetched", "checked", "code", "untested"),
    [(0, 0, 0, False), (3, 0, 0, True), (3, 2, 2, True), (0, 2, 2, False), (1, 0, 1, False)],
)
def test_ci_goes_on_without_model_and_ends_at_a_wrong_one(
    tmp_path: Path, fetched: int, checked: int, code: int, untested: bool
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    script(tmp_path / ".venv" / "bin" / "python", fetched, "-m")
    script(tmp_path / "bin" / "make", checked, "check")
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    done = subprocess.run([tmp_path / ".ci" / "run"], env=os.environ | {"PATH": path}, capture_output=True, text=True)
    commands = ["make install-dev", "python -m scripts.smollm2 build/smollm2"]
    commands += [UNTESTED] * untested + ["make check"] * (fetched != 1) + ["make test-core"] * (code == 0)
    assert (done.stdout.splitlines(), done.returncode) == (commands, code)


@needs_torch
@pytest.mark.parametrize(("file", "code", "why"), [(None, 3, "could not be fetched"), (b"GGUF?", 1, "it has sha256 ")])
def test_real_model_script_tells_wrong_from_unavailable(
    tmp_path: Path, file: bytes | None, code: int, why: str
) -> None:
    environment = {}
    if file:
        (tmp_path / "own.gguf").write_bytes(file)
        environment = {"TRIFORCE_SMOLLM2": str(tmp_path / "own.gguf")}
    run = f"from pathlib import Path; from scripts.smollm2 import main; main(Path({str(tmp_path / 'out')!r}))"
    exit_code, _, stderr = ended(started(run, tmp_path, **environment))
    assert exit_code == code and why in stderr.splitlines()[-1] and not (tmp_path / "out").exists()

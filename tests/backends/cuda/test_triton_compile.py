"""The kernels compile for a GPU, though there is none: for compute capability 9.0, with little shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_they_compile(tmp_path: Path) -> None:
    paths = [entry for entry in sys.path if entry]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "tests.helpers.cuda.compile_all"]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = {line.split()[0] for line in done.stdout.splitlines()}
    assert kernels == {
        "_splits", "_merge", "_weigh", "_turn_queries", "_write", "_norm", "_swiglu", "_best", "_exponentials",
        "_uniforms", "_decide", "_carry",
    }  # fmt: skip

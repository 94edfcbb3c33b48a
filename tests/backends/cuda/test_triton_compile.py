"""The kernels compile for GPUs that are not here, just as they are launched at the sizes of real models.

What ptxas and LLVM say of registers, spills and shared memory is kept in build/, by a hash of the sources: an
architecture takes most of a minute.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from tests.helpers.cuda.compiled import faults

ROOT = Path(__file__).parents[3]
SOURCES = (
    *sorted((ROOT / "src" / "triforce" / "backends" / "cuda").rglob("*.py")),
    ROOT / "src" / "triforce" / "backends" / "torch" / "model.py",
    ROOT / "src" / "triforce" / "bench" / "shapes.py",
    *(ROOT / "tests" / "helpers" / "cuda" / name for name in ("compile_all.py", "launches.py")),
)
KERNELS = {
    "_splits", "_merge", "_weigh", "_turn_queries", "_write", "_norm", "_swiglu", "_best", "_exponentials",
    "_uniforms", "_decide", "_carry", "_peaks", "_shortlist", "_join", "_cut", "race_parts", "close_race",
    "share_parts", "judge_parts",
}  # fmt: skip


def compiled(arch: str, folder: Path, *more: str) -> list[dict[str, Any]]:
    """What each kernel needs, as `compile_all` prints it."""
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": paths}
    command = [sys.executable, "-m", "tests.helpers.cuda.compile_all", arch, *more]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def kept(arch: str, folder: Path) -> list[dict[str, Any]]:
    """The same, from before if nothing has changed."""
    texts = [triton.__version__, torch.__version__, *(file.read_text(encoding="utf-8") for file in SOURCES)]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    file = ROOT / "build" / "compiled" / f"{arch}-{digest}.json"
    if not file.exists():
        rows = compiled(arch, folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(rows), encoding="utf-8")
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "arch",
    ["sm_89", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_90", "sm_120", "gfx942"))],
)
def test_triton_kernels_compile_as_launched(arch: str, tmp_path: Path) -> None:
    rows = kept(arch, tmp_path)
    assert {row["kernel"] for row in rows} == KERNELS
    assert [fault for row in rows for fault in faults(row)] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("plant", "told"),
    [("spill", "bytes of registers are spilled"), ("misalignment", "loads of keys or values are of two bytes")],
)
def test_planted_compiler_fault_is_noticed(plant: str, told: str, tmp_path: Path) -> None:
    (row,) = compiled("sm_89", tmp_path, "--plant", plant)
    assert any(told in fault for fault in faults(row))

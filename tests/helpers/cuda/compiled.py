"""Compiler results of every launch, and faults of compiled kernels by the limits of an architecture."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[3]
SOURCES = (
    *sorted((ROOT / "src" / "triforce" / "backends" / "cuda").rglob("*.py")),
    ROOT / "src" / "triforce" / "backends" / "kernel_api.py",
    *(ROOT / "src" / "triforce" / "backends" / "torch" / name for name in ("kv.py", "model.py")),
    ROOT / "src" / "triforce" / "bench" / "shapes.py",
    *(ROOT / "src" / "triforce" / "model" / name for name in ("config.py", "kv_rows.py")),
    *(ROOT / "tests" / "helpers" / "cuda" / name for name in ("compile_all.py", "compiled.py", "launches.py")),
)
TABLE = ROOT / "docs" / "data" / "gpu_kernels.toml"

SHARED = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_120": 99, "gfx942": 64}
"""KiB of shared memory per program."""
STRICT = {
    name: {True: f"{name}, strict", False: f"{name}, strict and plain"} for name in ("Llama-2-7B", "Llama-3.1-8B")
}
"""Cases of passes of a model that must have equal bits, by whether they observe the mass."""
IN_FLOAT32 = 32
"""Bytes that attention may spill in float32, which is for tests and comparisons: ptxas prefers more programs side by
side for any tile."""
SPILLED = {"sm_80": 8, "sm_120": 36}
"""Bytes that attention may spill otherwise: for int8 KV of heads of 64, and at 64 query rows. Other kernels may not."""


def faults(row: dict[str, Any]) -> Iterator[str]:
    """Yield the faults of a row of `compile_all`."""
    name = f"{row['kernel']} ({row['case']}, {row['arch']})"
    allowed = IN_FLOAT32 if row["bits"] == 32 else SPILLED.get(row["arch"], 0)
    if row["spills"] > allowed * (row["kernel"] == "_splits"):
        yield f"{name}: {row['spills']} bytes of registers are spilled"
    if row["shared"] > SHARED[row["arch"]] << 10:
        yield f"{name}: {row['shared']} bytes of shared memory, more than there are"
    by_copies = row["kernel"] == "_splits" and row["bits"] == 16 and row["arch"] != "gfx942"
    if by_copies and (row["copies"] < 16 or row["narrow"]):
        yield f"{name}: {row['narrow']} loads of keys or values are of two bytes, not copies of 16"


def unlike(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield kernels, of all rows, whose strict passes add in another order if they observe the mass."""
    for kernel, (name, cases) in product(("_splits", "_merge"), STRICT.items()):
        plain, observing = (
            {
                checksum
                for row in rows
                if (row["kernel"], row["case"]) == (kernel, cases[how])
                for checksum in row["sums"]
            }
            for how in (False, True)
        )
        if not plain or not plain <= observing:
            yield f"{kernel} of {name}: products and sums of plain strict passes are made in layouts of their own"


def all_faults(rows: list[dict[str, Any]]) -> set[str]:
    """Return the faults of all rows of an architecture."""
    return {fault for row in rows for fault in faults(row)} | {*unlike(rows)}


def compiled(arch: str, *options: str) -> list[dict[str, Any]]:
    """Return each kernel's needs, as `compile_all` prints them."""
    return [json.loads(line) for line in output_of("compile_all", arch, *options).splitlines()]


def output_of(module: str, *arguments: str) -> str:
    """Return the output of a module beside this one, in a process of its own: the interpreter is on in this one."""
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-m", f"tests.helpers.cuda.{module}", *arguments]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def digest() -> str:
    """Return a digest of the sources of kernels and launches, and of the compilers' versions."""
    texts = [
        version("triton"),
        torch.__version__.partition("+")[0],
        *(file.read_text(encoding="utf-8") for file in SOURCES),
    ]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def recorded(arch: str) -> bool:
    """Whether the table in docs/ is of these very sources, without a fault for an architecture."""
    made_of = tomllib.loads(TABLE.read_text(encoding="utf-8"))["sources"]
    return arch in made_of["archs"] and made_of["digest"] == digest()


def kept(arch: str) -> list[dict[str, Any]]:
    """Return the needs as `compiled` does, from a file if no source has changed."""
    file = ROOT / "build" / "compiled" / f"{arch}-{digest()}.json"
    if not file.exists():
        rows = compiled(arch)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(rows), encoding="utf-8")
    recorded_rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return recorded_rows

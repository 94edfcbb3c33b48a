"""The table of kernels for GPUs is what is compiled: what it chooses of that, and that it is fresh."""

from __future__ import annotations

import tomllib
from importlib.util import find_spec
from typing import Any

import pytest

from scripts import gpu_kernels


def row(arch: str, case: str, registers: int, programs: int = 8) -> dict[str, Any]:
    needed = {"registers": registers, "spills": 0, "shared": 1024}
    return {"kernel": "_splits", "case": case, "arch": arch, "programs": programs, "warps": 4} | needed


def test_kernel_table_shows_the_greediest_launch_of_each_kind() -> None:
    case = "Llama-3.1-8B, width 1"
    rows = {
        "sm_80": [row("sm_80", case, 90), row("sm_80", case, 100, 16), row("sm_80", "others", 255)],
        "sm_90": [row("sm_90", case, 80)],
        "gfx942": [row("gfx942", case, 40)],
    }
    columns = ("case", "archs", "registers", "programs")
    shown = [tuple(kernel_row[name] for name in columns) for kernel_row in gpu_kernels.kernels(rows)]
    assert shown == [(case, ["sm_80", "sm_90"], 100, [8, 16]), (case, ["gfx942"], 40, [8])]


def test_kernel_table_is_toml() -> None:
    rows = [{"case": 'a "row"', "programs": [1, 2]}]
    made_of = {"digest": "1", "archs": ["sm_90"]}
    assert tomllib.loads(gpu_kernels.toml(rows, made_of)) == {"sources": made_of, "kernels": rows}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton to compile with")
def test_kernel_table_is_what_compilers_say() -> None:
    written = gpu_kernels.TABLE.read_text(encoding="utf-8")
    assert written == gpu_kernels.text(list(gpu_kernels.SHARED)), "python -m scripts.gpu_kernels"

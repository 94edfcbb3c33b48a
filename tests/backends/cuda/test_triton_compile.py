"""The kernels compile for GPUs that are not here, just as they are launched at the sizes of real models.

What ptxas and LLVM say of registers, spills and shared memory is kept in build/, by a hash of the sources: an
architecture takes most of a minute.
"""

from __future__ import annotations

import pytest

from tests.helpers.cuda.compiled import compiled, faults, kept

KERNELS = {
    "_splits", "_merge", "_weigh", "_turn_queries", "_write", "_norm", "_swiglu", "_best", "_exponentials",
    "_uniforms", "_decide", "_carry", "_peaks", "_shortlist", "_join", "_cut", "race_parts", "close_race",
    "share_parts", "judge_parts", "_go_on", "_times", "_rows",
}  # fmt: skip


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "arch",
    ["sm_89", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_90", "sm_120", "gfx942"))],
)
def test_triton_kernels_compile_as_launched(arch: str) -> None:
    rows = kept(arch)
    assert {row["kernel"] for row in rows} == KERNELS
    assert {fault for row in rows for fault in faults(row)} == set()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("plant", "told"),
    [("spill", "bytes of registers are spilled"), ("misalignment", "loads of keys or values are of two bytes")],
)
def test_planted_compiler_fault_is_noticed(plant: str, told: str) -> None:
    (row,) = compiled("sm_89", "--plant", plant)
    assert any(told in fault for fault in faults(row))

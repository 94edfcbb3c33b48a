"""The kernels compile for GPUs that are not present, as they are launched at the sizes of real models.

Registers, spills and shared memory, by ptxas and LLVM, are cached in build/ by a hash of the sources: an architecture
takes most of a minute.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.cuda import compiled as compiled_by
from tests.helpers.cuda.compiled import SHARED, STRICT, all_faults, compiled, faults, kept, recorded, unlike

KERNELS = {
    "_splits", "_merge", "_weigh", "_turn_queries", "_write", "_norm", "_swiglu", "_best", "_exponentials",
    "_uniforms", "_decide", "_carry", "_peaks", "_shortlist", "_join", "_cut", "race_parts", "close_race",
    "share_parts", "judge_parts", "_go_on", "_times", "_add_parts", "_rows",
}  # fmt: skip


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", [pytest.param(arch, marks=pytest.mark.slow) for arch in SHARED])
def test_triton_kernels_compile_as_launched(arch: str) -> None:
    check(arch)


@pytest.mark.timeout(1800)
def test_changed_triton_kernels_compile_as_launched() -> None:
    """The architecture with the least shared memory is compiled, unless gpu-kernels.md has a table of these sources."""
    if recorded("sm_89"):
        pytest.skip("python -m scripts.gpu_kernels has compiled these very sources")
    check("sm_89")


def test_changed_source_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source := tmp_path / "kernel.py").write_text("a", encoding="utf-8")
    monkeypatch.setattr(compiled_by, "SOURCES", (source,))
    (table := tmp_path / "table.toml").write_text(
        f'[sources]\ndigest = "{compiled_by.digest()}"\narchs = ["sm_89"]\n', encoding="utf-8"
    )
    monkeypatch.setattr(compiled_by, "TABLE", table)
    assert recorded("sm_89") and not recorded("sm_90")
    source.write_text("b", encoding="utf-8")
    assert not recorded("sm_89")


def check(arch: str) -> None:
    """Check that all kernels are present and none has a fault."""
    rows = kept(arch)
    assert {row["kernel"] for row in rows} == KERNELS
    assert all_faults(rows) == set()


@pytest.mark.parametrize(("observing", "fault_count"), [(["a", "b", "c"], 0), (["a", "c"], 4), ([], 4)])
def test_strict_passes_of_other_layouts_are_noticed(observing: list[str], fault_count: int) -> None:
    sums = {case: observing if how else ["a", "b"] for cases in STRICT.values() for how, case in cases.items()}
    rows = [{"kernel": kernel, "case": case, "sums": sums[case]} for kernel in ("_splits", "_merge") for case in sums]
    assert len(list(unlike(rows))) == fault_count and len(list(unlike(rows[1:2]))) == 4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("plant", "message"),
    [("spill", "bytes of registers are spilled"), ("misalignment", "loads of keys or values are of two bytes")],
)
def test_planted_compiler_fault_is_noticed(plant: str, message: str) -> None:
    (row,) = compiled("sm_89", "--plant", plant)
    assert any(message in fault for fault in faults(row))

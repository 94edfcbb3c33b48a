"""The versions that an installation takes, with an NVIDIA driver and without one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def pinned(*arguments: str) -> dict[str, str]:
    """Versions that scripts/install.sh takes."""
    done = subprocess.run(
        [str(ROOT / "scripts" / "constraints.sh"), *arguments], capture_output=True, text=True, check=True
    )
    return dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)


@pytest.mark.parametrize(("where", "extras"), [((), ("dev",)), (("gpu",), ("dev", "gpu"))], ids=str)
def test_pinned_versions_are_those_that_extras_allow(where: tuple[str, ...], extras: tuple[str, ...]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = pinned(*where)
    texts = [*project["dependencies"], *(text for extra in extras for text in project["optional-dependencies"][extra])]
    for requirement in map(Requirement, texts):
        if requirement.name in versions:
            assert requirement.specifier.contains(versions[requirement.name]), requirement


def test_gpu_versions_are_pair_that_was_measured() -> None:
    """The extra names it, and nothing else is another one than on a CPU."""
    versions = pinned("gpu")
    base = pinned()
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"][
        "gpu"
    ]
    specifiers = {requirement.name: requirement.specifier for requirement in map(Requirement, extra)}
    own_versions = {name for name in versions if versions[name] != base[name]}
    assert own_versions == {"torch", "triton"} and set(specifiers) == own_versions | {"array-api-compat"}
    del specifiers["array-api-compat"]
    assert all(specifier.contains(versions[name]) for name, specifier in specifiers.items())
    assert not any(specifier.contains(base[name]) for name, specifier in specifiers.items())
    doctor = json.loads((ROOT / "benchmarks" / "results" / "gpu_doctor.json").read_text(encoding="utf-8"))
    (device,) = [check["figures"] for check in doctor["checks"] if check["name"] == "device"]
    measured = {name: device[name].partition("+")[0] for name in specifiers}
    assert all(specifier.contains(measured[name]) for name, specifier in specifiers.items())


DRY_INSTALL = """
uname() { echo Linux; }
make_venv() { mkdir -p .venv; }
pip() { echo "pip $*"; }
reach_cpu_build() { false; }
has_nvidia_driver() { [ -n "${DRIVER:-}" ]; }
has_kernels() { [ -z "${MISSING:-}" ]; }
requirements() { true; }
write_bytecode() { true; }
"""
TORCH = "pip install -qq --constraint .venv/constraints.txt torch=="


@pytest.mark.parametrize(("machine", "lines"), [
    ({}, []),
    ({"DRIVER": "580"}, [f"{TORCH}2.11.0"]),
    ({"MISSING": "kernels"}, [f"{TORCH}2.13.0"]),
])  # fmt: skip
def test_install_takes_torch_with_driver_or_without_kernels(
    machine: dict[str, str], lines: list[str], tmp_path: Path
) -> None:
    """Nothing is installed here: what asks the machine, and pip, is put in the place of its own."""
    (tmp_path / "scripts").mkdir()
    for name in ("constraints.txt", "constraints-gpu.txt", "scripts/constraints.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    script = (ROOT / "scripts" / "install.sh").read_text(encoding="utf-8")
    head, called, tail = script.partition("\nmake_venv\n")
    (tmp_path / "scripts" / "install.sh").write_text(head + DRY_INSTALL + called + tail, encoding="utf-8")
    done = subprocess.run(["sh", "scripts/install.sh"], cwd=tmp_path, env=os.environ | machine,
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert [line for line in done.stdout.splitlines() if "torch==" in line and line.startswith("pip ")] == lines
    assert ("packages (gpu)" in done.stdout) == ("DRIVER" in machine)

"""Checks of wheels before a release: each fault that a build may have without a word is refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from scripts import release

ABI3 = "triforce-0.1.0-cp312-abi3-manylinux_2_28_x86_64.whl"
ABI3_MODULE = "triforce/backends/cpu/_native.abi3.so"
ARM = "triforce-0.1.0-cp311-cp311-manylinux_2_28_aarch64.whl"
ARM_MODULE = "triforce/backends/cpu/_native.cpython-311-aarch64-linux-gnu.so"
INFO = "triforce-0.1.0.dist-info"


def made_wheel(folder: Path, name: str, modules: tuple[str, ...], tag: str = "", without: str = "") -> Path:
    """A wheel of empty files. tag: that of its metadata, by default the name's."""
    names = [*release.NEEDED_FILES, f"{INFO}/licenses/LICENSE", *modules]
    with zipfile.ZipFile(folder / name, "w") as archive:
        for file in names:
            if file != without:
                archive.writestr(file, "")
        archive.writestr(f"{INFO}/WHEEL", f"Wheel-Version: 1.0\nTag: {tag or '-'.join(name[:-4].split('-')[2:])}\n")
    return folder / name


@pytest.mark.parametrize(("name", "module", "tag", "processor"), [
    (ABI3, ABI3_MODULE, "cp312-abi3", "x86_64"),
    (ARM, ARM_MODULE, "cp311-cp311", "aarch64"),
])  # fmt: skip
def test_good_wheel_passes(name: str, module: str, tag: str, processor: str, tmp_path: Path) -> None:
    release.check_wheel(made_wheel(tmp_path, name, (module,)), tag, processor)


FAULTS = {
    "stable ABI dropped": ({"modules": ("triforce/backends/cpu/_native.cpython-312-x86_64-linux-gnu.so",)}, "modules"),
    "no kernels": ({"modules": ()}, "modules"),
    "bundled library": ({"modules": (ABI3_MODULE, "triforce.libs/libgomp.so.1")}, "modules"),
    "other processor": ({"modules": (ARM_MODULE,)}, "modules"),
    "tag of another Python": ({"name": ABI3.replace("cp312-abi3", "cp312-cp312")}, "tags"),
    "tag of this machine only": ({"name": ABI3.replace("manylinux_2_28", "linux")}, "tags"),
    "tag in the metadata": ({"tag": "cp312-abi3-linux_x86_64"}, "tags"),
    "no licence": ({"without": f"{INFO}/licenses/LICENSE"}, "LICENSE"),
    "no sample": ({"without": "triforce/assets/dracula.txt"}, "dracula"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_wheel_is_refused(fault: str, tmp_path: Path) -> None:
    changes, message = FAULTS[fault]
    wheel = made_wheel(tmp_path, **({"name": ABI3, "modules": (ABI3_MODULE,)} | changes))  # type: ignore[arg-type]
    with pytest.raises(release.ReleaseError, match=message):
        release.check_wheel(wheel, "cp312-abi3", "x86_64")


def test_heavy_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "MAX_WHEEL_BYTES", 100)
    with pytest.raises(release.ReleaseError, match="exceed 100"):
        release.check_wheel(made_wheel(tmp_path, ABI3, (ABI3_MODULE,)), "cp312-abi3", "x86_64")


@pytest.mark.parametrize(
    ("python", "expected"), [("3.11", "cp311-cp311"), ("3.12", "cp312-abi3"), ("3.14", "cp312-abi3")]
)
def test_wheel_of_python_is_found(python: str, expected: str) -> None:
    wheels = [Path(name) for name in (ABI3, ARM, ABI3.replace("x86_64", "aarch64"), ARM.replace("aarch64", "x86_64"))]
    assert f"-{expected}-" in release.fitting_wheel(wheels, python, "x86_64").name
    assert release.fitting_wheel(wheels, python, "aarch64").name.endswith("aarch64.whl")

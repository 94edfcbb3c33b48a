"""Results files of rows, written cell by cell, so that an interrupted measurement can be resumed."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triforce.arrays import is_gpu
from triforce.backends import dispatch
from triforce.errors import RequestError
from triforce.installed import version_of
from triforce.planner.cost_model import kernel_level
from triforce.whole_file import whole_file

if TYPE_CHECKING:
    from triforce.bench.roofline import Roofline

VERSION: int = 2
"""Version of the benches. It is raised when the meaning of a figure changes, so that figures of two versions are not
compared. Rows without it are "old bench": synthetic decoding left out its first step and cut its last verification
short, and some rows were made by scripts."""

FIELDS = ("machine", "level", "commit", "bench")
"""Fields that each row of results has, in the row itself or in the header of its file."""

ROOT = Path(__file__).resolve().parents[3]
MEASURED = ("src", "csrc", "benchmarks", "recipes", "pyproject.toml", "CMakeLists.txt", ":!benchmarks/results")
"""Paths of a checkout that figures depend on."""


def provenance(device: str = "cpu") -> dict[str, Any]:
    """Return machine, level, commit and bench version of figures measured on a device."""
    if not is_gpu(device):
        device_fields = machine(), kernel_level(device)
    else:
        from triforce.backends.torch.devices import capability, device_name

        major, minor = capability(device)
        device_fields = device_name(device), f"sm_{major}{minor}"
    return dict(zip(FIELDS, (*device_fields, commit(), VERSION), strict=True))


@cache
def commit() -> str | None:
    """Return the commit of this checkout at the first call, with `+` if files differ from it.

    None if this is not a checkout, as after an installation from a wheel.
    """
    root_and_commit = _git("rev-parse", "--show-toplevel", "HEAD").split("\n")
    if Path(root_and_commit[0]) != ROOT or len(root_and_commit) < 2:
        return None
    return root_and_commit[1][:8] + (
        "+" if _git("status", "--porcelain", "--untracked-files=all", "--", *MEASURED) else ""
    )


def _git(*arguments: str) -> str:
    """Return the output of a git command; an empty text if git fails or is missing."""
    try:
        command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
        process = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return "" if process.returncode else process.stdout.strip()


@cache
def machine() -> str:
    """Describe this machine: processor, cores, level of the kernels, torch, bytes and operations per second."""
    model = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    level = dispatch.native.level() if dispatch.native else "torch"
    return (
        f"{model or platform.machine()}, {dispatch.usable_cpus()} cores, kernels {level}, "
        f"torch {version_of('torch') or 'not installed'}, {measured_roofline()}"
    )


@cache
def measured_roofline() -> Roofline:
    """Return the roofline of this machine, measured at the first call."""
    from triforce.bench import roofline

    return roofline.measure()


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


Row = dict[str, Any]


def dumps(report: dict[str, Any]) -> str:
    """Return a report as JSON with a line for each row."""
    lines = []
    for name, value in report.items():
        rows = ",\n  ".join(map(json.dumps, value)) if isinstance(value, list) else ""
        lines.append(f" {json.dumps(name)}: " + (f"[\n  {rows}\n ]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


class ResultsFile:
    """Rows of a results file under a header. An existing file of the same settings is continued.

    header: fields that all rows share. fixed: names of the fields that must be equal to continue. verdict: name of a
    value that only a complete report has; a complete report is replaced. If a field of `FIELDS` was different when
    earlier rows were measured, these rows keep its former value. Raises RequestError if the file has rows of other
    settings, or is not a file of results.
    """

    def __init__(
        self, file: str | Path | None, header: dict[str, Any], fixed: Sequence[str], verdict: str | None = None
    ) -> None:
        self.path = Path(file) if file else None
        self.header = header
        self.rows: list[Row] = []
        if self.path and self.path.exists():
            self.rows = self._earlier_rows(self.path, fixed, verdict)

    def _earlier_rows(self, path: Path, fixed: Sequence[str], verdict: str | None) -> list[Row]:
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            rows = report["rows"]
            recorded_values = [report.get(name) for name in fixed]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RequestError(f"{path} is not a file of results ({error}); name another one") from error
        if verdict in report:
            return []
        expected_values = json.loads(json.dumps([self.header[name] for name in fixed]))
        if changed := [name for name, a, b in zip(fixed, recorded_values, expected_values, strict=True) if a != b]:
            raise RequestError(
                f"{path} was measured otherwise ({', '.join(changed)}); name another file, or remove it to begin again"
            )
        source = {name: report.get(name) for name in FIELDS if report.get(name) != self.header.get(name)}
        source |= {"recorded_in": report["recorded_in"]} if "recorded_in" in report else {}
        return [row | source | row for row in rows]

    @property
    def cells(self) -> set[str]:
        """Return the names of the measured cells."""
        return {row["cell"] for row in self.rows}

    def add(self, rows: Sequence[Row]) -> None:
        """Append the rows of a cell. The file is replaced as a whole, so it is valid JSON at any time."""
        self.rows += rows
        if self.path:
            with whole_file(self.path) as partial:
                partial.write_text(dumps(self.header | {"rows": self.rows}), encoding="utf-8")

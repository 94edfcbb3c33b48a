"""A file of rows that grows cell by cell, so that a measurement that was cut off can go on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triforce.bench.provenance import FIELDS
from triforce.errors import RequestError
from triforce.whole_file import whole_file

Row = dict[str, Any]


def dumps(report: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    lines = []
    for name, value in report.items():
        rows = ",\n  ".join(map(json.dumps, value)) if isinstance(value, list) else ""
        lines.append(f" {json.dumps(name)}: " + (f"[\n  {rows}\n ]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


class ResultsFile:
    """`about` is what the rows have in common; `fixed` are those parts of it that must be as before to go on.

    Rows that were measured with another commit, machine or level than what follows say so themselves. A report that has
    a value called `verdict` is whole, and is begun anew. Raises RequestError where the file has rows of something else,
    or is none of ours.
    """

    def __init__(
        self, file: str | Path | None, about: dict[str, Any], fixed: Sequence[str], verdict: str | None = None
    ) -> None:
        self.path, self.about = Path(file) if file else None, about
        self.rows: list[Row] = []
        if self.path and self.path.exists():
            self.rows = self._earlier(self.path, fixed, verdict)

    def _earlier(self, path: Path, fixed: Sequence[str], verdict: str | None) -> list[Row]:
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            rows, before = report["rows"], [report.get(name) for name in fixed]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RequestError(f"{path} is not a file of results ({error}); name another one") from error
        if verdict in report:
            return []
        now = json.loads(json.dumps([self.about[name] for name in fixed]))
        if changed := [name for name, a, b in zip(fixed, before, now, strict=True) if a != b]:
            raise RequestError(
                f"{path} was measured otherwise ({', '.join(changed)}); name another file, or remove it to begin again"
            )
        source = {name: report.get(name) for name in FIELDS if report.get(name) != self.about.get(name)}
        source |= {"recorded_in": report["recorded_in"]} if "recorded_in" in report else {}
        return [row | source | row for row in rows]

    @property
    def cells(self) -> set[str]:
        """Names of the cells that are measured."""
        return {row["cell"] for row in self.rows}

    def add(self, rows: Sequence[Row]) -> None:
        """Keep the rows of a cell; the file is whole at any time."""
        self.rows += rows
        if self.path:
            with whole_file(self.path) as partial:
                partial.write_text(dumps(self.about | {"rows": self.rows}), encoding="utf-8")

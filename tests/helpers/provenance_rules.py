"""Rules for a file of results: each row names its origin, in agreement with the history of the file.

(a) A row has machine, level, commit and version of the bench, by itself or by the head of its file. Rows older than
this rule have the commit that recorded them, or the one at which they were measured, as in the history.
(b) The commit led to the one that recorded the row, and has the bench.
(c) A measured number stands under one commit, in the file and in earlier versions of it. Where an earlier version was
wrong, the row says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.recorded_files import History
from triforce.bench.results_file import FIELDS

LAST_WITHOUT = "3b483a83"
"""The last commit before this rule."""

LABELS = frozenset({*FIELDS, "command", "recorded_in", "mended", "corrected"})
OLD = "old bench"
DIGITS = 8
"""Number of digits that two measurements do not share by chance."""

VERSION_AT = ("src/triforce/bench/results_file.py", "src/triforce/bench/provenance.py")
"""Files that have held the version of the benches, the current one first."""
MODULES = (
    (r"\bbenchmarks\.(\w+)", ("benchmarks/{}.py", "benchmarks/{}/__main__.py")),
    (r"\btests\.helpers\.(\w+)", ("tests/helpers/{}/__main__.py",)),
    (r"\btriforce bench (\w+)", ("src/triforce/cli/bench/{}.py", "benchmarks/{}/command.py")),
    (r"\btriforce (\w+)", ("src/triforce/cli/{}.py",)),
    (r"\bpython (scripts/\w+\.py)", ("{}",)),
)
"""Files of a bench, by a pattern of its command."""


@dataclass(frozen=True)
class Row:
    """A row of results, with the labels of its file's head."""

    labels: Mapping[str, Any]
    content: str
    measured: frozenset[float]
    name: str

    def stands(self, rows: list[Row]) -> list[Row]:
        """Return rows with the same measured numbers, or, without measured numbers, with the same content."""
        if self.measured:
            return [row for row in rows if self.measured <= row.measured]
        return [row for row in rows if self.content == row.content]


def rows(report: Any, head: Mapping[str, Any] | None = None) -> list[Row]:
    """Return the rows of a file: lists of rows, below a head or not. A report without a list is a row itself."""
    if isinstance(report, list):
        return [_row(row, head or {}) for row in report]
    head = {**(head or {}), **_labels(report)}
    collected = list[Row]()
    for value in report.values():
        if _are_rows(value) or (isinstance(value, dict) and "rows" in value):
            collected += rows(value, head)
    return collected or [_row(report, {})]


def _are_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _labels(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name in LABELS}


def _row(row: dict[str, Any], head: Mapping[str, Any]) -> Row:
    content = json.dumps({name: value for name, value in row.items() if name not in LABELS}, sort_keys=True)
    measured = frozenset() if row.get("what") == "computed" else frozenset(_measured(row, ""))
    return Row({**head, **_labels(row)}, content, measured, str(row.get("what") or content[:80]))


def _measured(value: Any, name: str) -> Iterator[float]:
    """Yield seconds and rates per second, if they have all of their digits."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _measured(child, f"{name} {key}")
    elif isinstance(value, list):
        for child in value:
            yield from _measured(child, name)
    elif isinstance(value, float) and "second" in name and "least" not in name and _digits(value) >= DIGITS:
        yield value


def _digits(value: float) -> int:
    return len(re.sub(r"e.*|\D", "", repr(value)).strip("0"))


@dataclass
class RecordedFile:
    """A file of results and its earlier versions by their commits, the first one first."""

    report: Any
    earlier: Mapping[str, Any]
    history: History
    _versions: dict[str, list[Row]] = field(init=False)
    _places: dict[float, list[tuple[str, str]]] = field(init=False)

    def __post_init__(self) -> None:
        self._versions = {commit: rows(report) for commit, report in self.earlier.items()}
        self._places = {}
        for version, version_rows in (*self._versions.items(), ("", rows(self.report))):
            for row in version_rows:
                for number in row.measured if row.labels.get("commit") else ():
                    self._places.setdefault(number, []).append((version, row.labels["commit"]))

    def faults(self) -> list[str]:
        """Return the faults of each row, an empty list if there are none."""
        faults = list[str]()
        for row in rows(self.report):
            rule_a = "(a)", self._unlabelled(row)
            told_of_commit = "(b)", self._impossible(row) if row.labels.get("commit") else ""
            faults += [f"{rule} {row.name}: {why}" for rule, why in (rule_a, told_of_commit) if why]
            if why := next(filter(None, (self._contradicted(row, number) for number in sorted(row.measured))), ""):
                faults.append(f"(c) {row.name}: {why}")
        return faults

    def _unlabelled(self, row: Row) -> str:
        earlier_commits = self.history.before(LAST_WITHOUT)
        recorded = row.labels.get("recorded_in")
        if recorded is not None:
            stands = recorded in earlier_commits and row.stands(self._versions.get(recorded, []))
            return "" if stands else f"it does not stand in the file of {recorded}, or that is not from before the rule"
        missing = [name for name in FIELDS if row.labels.get(name) is None]
        if not missing and row.labels["bench"] != OLD:
            return ""
        old = [
            old_row
            for commit, version_rows in self._versions.items()
            if commit in earlier_commits
            for old_row in row.stands(version_rows)
        ]
        if row.labels.get("commit") and row.labels["commit"] in {old_row.labels.get("commit") for old_row in old}:
            return ""
        return f"it has no {', '.join(missing)}" if missing else f"no {OLD} made it: it is not from before the rule"

    def _impossible(self, row: Row) -> str:
        label = row.labels["commit"]
        bench = row.labels.get("bench")
        commit = label.removesuffix("+")
        command = str(row.labels.get("command"))
        recorder = next((commit for commit, match in self._versions.items() if row.stands(match)), self.history.head)
        if commit not in self.history.before(recorder):
            return f"{commit} did not lead to {recorder}, which recorded it"
        modules = [
            path.format(match[1]) for key, paths in MODULES if (match := re.search(key, command)) for path in paths
        ]
        if label != commit or (bench == OLD and not modules):
            return ""
        if all(self.history.text(commit, module) is None for module in modules):
            return f"{commit} lacks the bench of `{command}`"
        if isinstance(bench, int):
            texts = "\n".join(self.history.text(commit, file) or "" for file in VERSION_AT)
            version = re.search(r"^VERSION\b.*= (\d+)$", texts, re.MULTILINE)
            if version is None or int(version[1]) != bench:
                return f"{commit} lacks version {bench} of the benches"
        return ""

    def _contradicted(self, row: Row, number: float) -> str:
        """Return a message if a number stands under another commit: the first commit is right, others are faults."""
        places = self._places.get(number, [])
        label = row.labels.get("commit")
        if places and places[0][1] != label:
            return f"{number} stood first under {places[0][1]}, not {label}"
        for version, label_there in places:
            if (
                version
                and label_there != label
                and f"{version} had it under {label_there}" not in row.labels.get("mended", "")
            ):
                return f"{number} stands under {label_there} in {version}"
        return ""

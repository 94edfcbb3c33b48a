"""Counts of what makes code read like a private language: python -m scripts.dialect [--lower].

bare: bindings whose whole name is an adjective, a pronoun or an adverb, in 100 bindings. filler: phrases that stand in
the place of a noun of the field, in 1,000 lines. packed: assignments of several values to several names in one
statement, in 1,000 lines. The counts of each area are held by `tests/data/dialect.toml`, and may only fall: `--lower`
writes those that have fallen, and exit code 1 tells of one that has risen.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from fractions import Fraction
from math import ceil
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = ROOT / "tests" / "data" / "dialect.toml"
BARE_NAMES = frozenset(
    re.findall(
        r"\w+",
        """
        about after ahead alike all alone among any apart before begun behind both came each even far few first
        found fresh given heard held here it its kept known last late later least left less like lost made many more
        most much near news next none now one other others own rest said same seen some such them there these they
        those told untold usual wanted whole
        """,
    )
)
FILLER = re.compile(r"\b(?:so many|whoever|nobody|somebody|of which|those that)\b", re.IGNORECASE)
GENERATED = re.compile(r"<!-- (\S+), by scripts/docs.py -->.*?<!-- end of \1 -->", re.DOTALL)
AREAS = {
    "src": ("src/triforce", {".py"}),
    "tests": ("tests benchmarks recipes scripts examples", {".py"}),
    "csrc": ("csrc", {".cpp", ".hpp"}),
    "docs": ("docs README.md", {".md"}),
    "page": ("src/triforce/server/web", {".css", ".html", ".js"}),
}
"""Folders and suffixes of each area."""
PRECISION = 10
"""Counts are kept in tenths."""


def texts_of(area: str) -> Iterator[str]:
    """Yield the text of each file of an area, without the parts of pages that `scripts/docs.py` writes."""
    places, suffixes = AREAS[area]
    for place in places.split():
        path = ROOT / place
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in suffixes and file != Path(__file__):
                yield GENERATED.sub("", file.read_text(encoding="utf-8"))


def bindings(tree: ast.AST) -> Iterator[str]:
    """Yield the name of each variable that a module assigns, and of each parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def packed_assignments(tree: ast.AST) -> int:
    """Count assignments of a tuple or a list to a tuple of names."""
    several = ast.Tuple | ast.List
    assignments = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
    return sum(isinstance(node.value, several) and isinstance(node.targets[0], several) for node in assignments)


def counts_of(texts: Iterable[str], *, python: bool) -> dict[str, float]:
    """Return the counts of some texts, rounded up; of names and assignments those of Python alone."""
    lines = names = bare = filler = packed = 0
    for text in texts:
        lines += text.count("\n")
        filler += len(FILLER.findall(text))
        if python:
            tree = ast.parse(text)
            module_names = list(bindings(tree))
            names += len(module_names)
            bare += sum(name.strip("_") in BARE_NAMES for name in module_names)
            packed += packed_assignments(tree)
    counts = {"filler": Fraction(1000 * filler, max(lines, 1))}
    if python:
        counts["bare"] = Fraction(100 * bare, max(names, 1))
        counts["packed"] = Fraction(1000 * packed, max(lines, 1))
    return {kind: ceil(count * PRECISION) / PRECISION for kind, count in sorted(counts.items())}


def measured() -> dict[str, dict[str, float]]:
    """Return the counts of each area."""
    return {area: counts_of(texts_of(area), python=".py" in suffixes) for area, (_, suffixes) in AREAS.items()}


def limits() -> dict[str, dict[str, float]]:
    """Return the highest count of each kind in each area."""
    return tomllib.loads(LIMITS.read_text(encoding="utf-8"))


def written(counts: dict[str, dict[str, float]]) -> str:
    """Return counts as TOML."""
    areas = (
        f"[{area}]\n" + "".join(f"{kind} = {count}\n" for kind, count in kinds.items())
        for area, kinds in counts.items()
    )
    return "# Highest counts by scripts/dialect.py, which may only fall.\n\n" + "\n".join(areas)


def main(arguments: list[str]) -> int:
    """Print the counts beside their limits. Returns 1 where one is above its limit."""
    highest = limits()
    counts = measured()
    for area, kinds in counts.items():
        print(area, ", ".join(f"{kind} {count} (at most {highest[area][kind]})" for kind, count in kinds.items()))
    if "--lower" in arguments:
        lowered = {
            area: {kind: min(count, highest[area][kind]) for kind, count in kinds.items()}
            for area, kinds in counts.items()
        }
        LIMITS.write_text(written(lowered), encoding="utf-8")
    return int(any(count > highest[area][kind] for area, kinds in counts.items() for kind, count in kinds.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Counts of what makes code read like a private language: python -m scripts.dialect [--lower].

bare: bindings whose whole name is an adjective, a pronoun or an adverb, per 100 bindings. filler: phrases in the place
of a noun of the field, per 1,000 lines. packed: assignments of several values to several names in one statement, per
1,000 lines. `tests/data/dialect.toml` has the highest count of each kind in each area. These limits may only fall:
`--lower` writes the counts that have fallen. Exit code 1 means that a count is above its limit. `retired_uses` lists
words that the glossary page has retired.
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
    "page": ("web/src", {".css", ".html", ".js", ".jsx"}),
}
"""Folders and suffixes of each area."""
GLOSSARY = ROOT / "docs" / "concepts" / "glossary.md"
RETIRED_HEADING = "## Retired words"
PRECISION = 10
"""Counts are rounded up to tenths."""


def texts_of(area: str) -> Iterator[str]:
    """Yield the text of each file of an area, without the parts of pages that `scripts/docs.py` writes."""
    places, suffixes = AREAS[area]
    for place in places.split():
        path = ROOT / place
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in suffixes and file != Path(__file__):
                yield GENERATED.sub("", file.read_text(encoding="utf-8"))


def words_of(text: str) -> str:
    """Return a text in lower case, with names in snake case and camel case divided into their words."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[_-]", " ", text).lower()


def retired_words(page: str) -> list[str]:
    """Return the words in the first column of the glossary's table of retired words."""
    section = page.partition(RETIRED_HEADING)[2]
    return [
        word.strip() for row in re.findall(r"^\| ([a-z, ]+) \|", section, re.MULTILINE)[1:] for word in row.split(",")
    ]


def retired_uses() -> list[str]:
    """Return each retired word that occurs in an area, as "area: word"."""
    page = GLOSSARY.read_text(encoding="utf-8")
    patterns = {word: re.compile(rf"\b{word}\b") for word in retired_words(page)}
    uses = set()
    for area in AREAS:
        for text in texts_of(area):
            words = words_of(text.partition(RETIRED_HEADING)[0])
            uses |= {f"{area}: {word}" for word, pattern in patterns.items() if pattern.search(words)}
    return sorted(uses)


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
    """Return the counts of some texts, rounded up. Only Python has counts of names and assignments."""
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


def measured_counts() -> dict[str, dict[str, float]]:
    """Return the counts of each area."""
    return {area: counts_of(texts_of(area), python=".py" in suffixes) for area, (_, suffixes) in AREAS.items()}


def count_limits() -> dict[str, dict[str, float]]:
    """Return the highest count of each kind in each area."""
    return tomllib.loads(LIMITS.read_text(encoding="utf-8"))


def toml_text(counts: dict[str, dict[str, float]]) -> str:
    """Return counts as TOML."""
    areas = (
        f"[{area}]\n" + "".join(f"{kind} = {count}\n" for kind, count in kinds.items())
        for area, kinds in counts.items()
    )
    return "# Highest counts by scripts/dialect.py, which may only fall.\n\n" + "\n".join(areas)


def main(arguments: list[str]) -> int:
    """Print the counts beside their limits. Returns 1 if a count is above its limit."""
    highest = count_limits()
    counts = measured_counts()
    for area, kinds in counts.items():
        print(area, ", ".join(f"{kind} {count} (at most {highest[area][kind]})" for kind, count in kinds.items()))
    if "--lower" in arguments:
        lowered = {
            area: {kind: min(count, highest[area][kind]) for kind, count in kinds.items()}
            for area, kinds in counts.items()
        }
        LIMITS.write_text(toml_text(lowered), encoding="utf-8")
    return int(any(count > highest[area][kind] for area, kinds in counts.items() for kind, count in kinds.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

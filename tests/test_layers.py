"""Imports go one way: down the table of docs/design.md, which is read here and so cannot drift from the code.

A row of the table is a level. A module may import what stands on lower levels. On its own level it may import only its
own folder or group: `a` (`b`, `c`) is one group of modules. The nouns of level 0 may also import those left of them.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "triforce"
DESIGN = ROOT / "docs" / "design.md"
# The algorithm knows neither a model nor a cache, although caches stand below it.
APART = {"speculation": {"cache", "decoder"}}


class Unit(NamedTuple):
    """A module with those grouped under it, or a folder, in its place in the table."""

    name: str
    level: int
    place: int


def read_table(text: str) -> dict[str, Unit]:
    """The unit of each top-level module; in brackets after a folder stand its contents, which belong to it anyway."""
    units: dict[str, Unit] = {}
    for row in re.finditer(r"^\| (\d+) \| (.+?) \|", text, re.MULTILINE):
        unit, inside = Unit("", 0, 0), False
        for place, token in enumerate(re.findall(r"`[^`]+`|[()]", row[2])):
            if token in "()":
                inside = token == "("
                continue
            name = token.strip("`")
            if not inside:
                unit = Unit(name, int(row[1]), place)
                units[name.removesuffix("/")] = unit
            elif not unit.name.endswith("/"):
                units[name] = unit
    return units


def modules(source: Path) -> dict[str, Path]:
    """Dotted name below the package, and file; `__init__` is the package itself."""
    found = {}
    for file in sorted(source.rglob("*.py")):
        parts = list(file.relative_to(source).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = file
    return found


def imports(code: str, known: set[str]) -> set[str]:
    """Top-level modules of triforce that `code` imports anywhere, inside functions and for type checking too."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for package, _, rest in (name.partition(".") for name in names):
            if package == "triforce":
                top = rest.partition(".")[0]
                found.add(top if top in known else "__init__")
    return found


def violations(files: dict[str, str], units: dict[str, Unit]) -> list[str]:
    """What is wrong in {dotted name: code}."""
    known = {name.partition(".")[0] for name in files}
    wrong = [f"{name} has no level in docs/design.md" for name in sorted(known - set(units))]
    for name, code in files.items():
        top = name.partition(".")[0]
        for target in sorted(imports(code, known)) if top in units else ():
            if target in units and not allowed(units[top], units[target]):
                wrong.append(f"{name} (level {units[top].level}) imports {target} (level {units[target].level})")
    return wrong


def allowed(importer: Unit, imported: Unit) -> bool:
    if imported.name.strip("/") in APART.get(importer.name.strip("/"), ()):
        return False
    nouns = importer.level == imported.level == 0 and imported.place < importer.place
    return importer == imported or imported.level < importer.level or nouns


@pytest.fixture(scope="module")
def units() -> dict[str, Unit]:
    return read_table(DESIGN.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return {name: file.read_text(encoding="utf-8") for name, file in modules(SOURCE).items()}


def test_imports_point_downwards(files: dict[str, str], units: dict[str, Unit]) -> None:
    assert not violations(files, units)


def test_the_table_names_only_what_exists(files: dict[str, str], units: dict[str, Unit]) -> None:
    assert set(units) <= {name.partition(".")[0] for name in files}


TABLE = """
| level | modules | what |
|---|---|---|
| 0 | `errors`, `request` | nouns |
| 1 | `files` | a |
| 2 | `cache/` (`full`), `other` | b |
| 3 | `speculation/`, `head` (`part`, `__init__`) | c |
"""


def test_the_table_is_read_as_meant() -> None:
    units = read_table(TABLE)
    assert set(units) == {"errors", "request", "files", "cache", "other", "speculation", "head", "part", "__init__"}
    assert {name: unit.level for name, unit in units.items() if unit.level > 1} == {
        **{"cache": 2, "other": 2, "speculation": 3, "head": 3, "part": 3, "__init__": 3}
    }


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("files", "from triforce.request import X"),
        ("request", "from triforce.errors import X"),
        ("cache.full", "from triforce.cache.pool import X"),
        ("head", "from triforce.part import X\nimport torch"),
        ("part", "def f():\n    from triforce import other"),
    ],
)
def test_what_is_allowed(name: str, code: str) -> None:
    assert not violations(stand_in(name, code), read_table(TABLE))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("errors", "from triforce.request import X"),
        ("files", "from triforce.cache import X"),
        ("files", "import triforce.cache.full"),
        ("files", "def f():\n    from triforce import other"),
        ("files", "if TYPE_CHECKING:\n    from triforce.other import X"),
        ("files", "from triforce import X"),
        ("cache.full", "from triforce.other import X"),
        ("speculation.tier", "from triforce.cache.full import X"),
        ("unheard_of", ""),
    ],
)
def test_what_is_caught(name: str, code: str) -> None:
    assert len(violations(stand_in(name, code), read_table(TABLE))) == 1


def test_relative_imports_are_refused() -> None:
    with pytest.raises(AssertionError, match="absolute"):
        imports("from . import errors", set())


def stand_in(name: str, code: str) -> dict[str, str]:
    """A package of empty modules, but for one."""
    return dict.fromkeys(read_table(TABLE), "") | {name: code}

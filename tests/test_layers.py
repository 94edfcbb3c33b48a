"""Imports go one way: down the levels of docs/data/layers.toml, and inside some packages in the order given there."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers import house
from tests.helpers.house import Graph

ROOT = Path(__file__).parents[1]
LAYERS = tomllib.loads((ROOT / "docs" / "data" / "layers.toml").read_text(encoding="utf-8"))


class Unit(NamedTuple):
    """A package, or modules that are grouped, in its place in the table."""

    level: int
    place: int
    ordered: bool


def units(levels: list[dict[str, Any]]) -> dict[str, Unit]:
    found: dict[str, Unit] = {}
    for level, row in enumerate(levels):
        for place, names in enumerate(row["modules"]):
            unit = Unit(level, place, row.get("ordered", False))
            found |= dict.fromkeys([names] if isinstance(names, str) else names, unit)
    return found


def misplaced(graph: Graph, layers: dict[str, Any]) -> list[str]:
    """What is wrong between top-level modules and packages."""
    found = units(layers["levels"])
    wrong = [f"{name} has no level, or is gone" for name in sorted(set(graph) ^ set(found))]
    for name in set(graph) & set(found):
        for target in graph[name] & set(found):
            if not allowed(found[name], found[target]) or target in layers["apart"].get(name, ()):
                wrong.append(f"{name} (level {found[name].level}) imports {target} (level {found[target].level})")
    return wrong


def allowed(importer: Unit, imported: Unit) -> bool:
    before = importer.ordered and imported.level == importer.level and imported.place < importer.place
    return importer == imported or imported.level < importer.level or before


def disordered(graph: Graph, package: str, order: list[str]) -> list[str]:
    """What is wrong inside a package."""
    inside = {name for name in graph if name.startswith(f"{package}.")}
    wrong = [f"{name} has no place, or is gone" for name in sorted(inside ^ set(order))]
    for place, name in enumerate(order):
        wrong += [f"{name} imports {target}" for target in graph.get(name, set()) & inside - set(order[:place])]
    return wrong


@pytest.fixture(scope="module")
def graph() -> Graph:
    return house.imports(house.modules(ROOT / "src" / "triforce"))


def test_imports_point_downwards(graph: Graph) -> None:
    assert not misplaced(house.tops(graph), LAYERS)


@pytest.mark.parametrize("package", LAYERS["order"])
def test_imports_follow_the_order(graph: Graph, package: str) -> None:
    assert not disordered(graph, package, LAYERS["order"][package])


MADE: dict[str, Any] = {
    "levels": [
        {"modules": ["t.errors", "t.request"], "ordered": True},
        {"modules": ["t.files"]},
        {"modules": ["t.cache", "t.other"]},
        {"modules": ["t.speculation", ["t.head", "t.part", "t.__init__"]]},
    ],
    "apart": {"t.speculation": ["t.cache"]},
}


def made(name: str, code: str) -> Graph:
    """A package of empty modules, but for one."""
    others = ("errors", "request", "files", "cache", "cache.full", "cache.pool", "other", "speculation", "head", "part")
    tree = {"t": ""} | {f"t.{other}": "" for other in others} | {name: code}
    return house.imports({each: ast.parse(text) for each, text in tree.items()})


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("t.files", "from t.request import X"),
        ("t.request", "from t.errors import X"),
        ("t.cache.full", "from t.cache.pool import X"),
        ("t.head", "from t.part import X\nimport torch"),
        ("t.part", "def f():\n    from t import other"),
    ],
)
def test_what_is_allowed(name: str, code: str) -> None:
    assert not misplaced(house.tops(made(name, code)), MADE)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("t.errors", "from t.request import X"),
        ("t.files", "from t.cache import X"),
        ("t.files", "import t.cache.full"),
        ("t.files", "def f():\n    from t import other"),
        ("t.files", "if TYPE_CHECKING:\n    from t.other import X"),
        ("t.files", "from t import X"),
        ("t.cache.full", "from t.other import X"),
        ("t.speculation", "from t.cache.full import X"),
        ("t.unheard_of", ""),
    ],
)
def test_what_is_caught(name: str, code: str) -> None:
    assert len(misplaced(house.tops(made(name, code)), MADE)) == 1


@pytest.mark.parametrize(("order", "wrong"), [(["pool", "full"], 0), (["full", "pool"], 1), (["full"], 2)])
def test_what_is_in_order(order: list[str], wrong: int) -> None:
    graph = made("t.cache.full", "from t.cache import pool")
    assert len(disordered(graph, "t.cache", [f"t.cache.{name}" for name in order])) == wrong

"""Imports go one way: down the levels of docs/data/layers.toml, and inside some packages in the order given there."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import house
from tests.helpers.house import Graph

ROOT = Path(__file__).parents[1]
FAMILY = re.compile(r"llama|mistral|mixtral|qwen|gpt.?oss|gemma|phi.?[34]|smollm|granite|olmo|glm", re.IGNORECASE)
OF_NO_FAMILY = ("engine", "kvcache", "backends", "speculation", "planner", "sampling")
BESIDE = ("benchmarks", "examples", "gguf", "recipes", "scripts", "tests")
"""Folders of a checkout, and a library that its tests read and write files with."""
LAYERS = tomllib.loads((ROOT / "docs" / "data" / "layers.toml").read_text(encoding="utf-8"))


def misplaced(graph: Graph, levels: list[dict[str, Any]]) -> list[str]:
    """What is wrong between top-level modules and packages."""
    levels_of = {name: level for level, row in enumerate(levels) for name in row["modules"]}
    wrong = [f"{name} has no level, or is gone" for name in sorted(set(graph) ^ set(levels_of))]
    for name in set(graph) & set(levels_of):
        for target in graph[name] & set(levels_of) - {name}:
            if levels_of[target] >= levels_of[name]:
                wrong.append(f"{name} (level {levels_of[name]}) imports {target} (level {levels_of[target]})")
    return wrong


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
    assert not misplaced(house.tops(graph), LAYERS["levels"])


def of_checkout(code: ast.Module) -> list[str]:
    """Names of imports that a checkout has and a wheel has not."""
    return [name for name in house.imported(code) if name.partition(".")[0] in BESIDE]


def test_package_imports_nothing_that_wheel_lacks() -> None:
    imports_of = {name: of_checkout(code) for name, code in house.modules(ROOT / "src" / "triforce").items()}
    assert imports_of and not {name: names for name, names in imports_of.items() if names}


@pytest.mark.parametrize(
    "code", ["import benchmarks.study", "def f():\n    from tests.helpers import house", "from gguf import quants"]
)
def test_imports_of_checkout_are_found(code: str) -> None:
    assert of_checkout(ast.parse(code)) and not of_checkout(ast.parse("from triforce.bench import speed"))


@pytest.mark.parametrize("package", LAYERS["order"])
def test_imports_follow_package_order(graph: Graph, package: str) -> None:
    assert not disordered(graph, package, LAYERS["order"][package])


MADE: list[dict[str, Any]] = [
    {"modules": ["t.errors"]},
    {"modules": ["t.files", "t.speculation"]},
    {"modules": ["t.cache", "t.other"]},
    {"modules": ["t.head", "t.__init__"]},
]


def made(name: str, code: str) -> Graph:
    """A package of empty modules, but for one."""
    modules = ("errors", "files", "speculation", "cache", "cache.full", "cache.pool", "other", "head")
    tree = {"t": ""} | {f"t.{module}": "" for module in modules} | {name: code}
    return house.imports({name_of_module: ast.parse(text) for name_of_module, text in tree.items()})


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("t.files", "from t.errors import X"),
        ("t.cache.full", "from t.cache.pool import X"),
        ("t.head", "from t.files import X\nimport torch"),
        ("t.head", "def f():\n    from t import other"),
    ],
)
def test_allowed_imports_pass_check(name: str, code: str) -> None:
    assert not misplaced(house.tops(made(name, code)), MADE)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("t.errors", "from t.files import X"),
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
def test_forbidden_imports_are_found(name: str, code: str) -> None:
    assert len(misplaced(house.tops(made(name, code)), MADE)) == 1


@pytest.mark.parametrize(("order", "wrong"), [(["pool", "full"], 0), (["full", "pool"], 1), (["full"], 2)])
def test_package_order_is_checked(order: list[str], wrong: int) -> None:
    graph = made("t.cache.full", "from t.cache import pool")
    assert len(disordered(graph, "t.cache", [f"t.cache.{name}" for name in order])) == wrong


def families_in(code: str) -> set[str]:
    """Names and texts in Python code, docstrings left out, that name a family of models."""
    nodes = list(ast.walk(ast.parse(code)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings}
    names = {
        str(getattr(node, field)) for node in nodes for field in ("id", "attr", "name", "arg") if hasattr(node, field)
    }
    return {name for name in names | {text for text in texts if isinstance(text, str)} if FAMILY.search(name)}


def test_engine_views_and_kernels_name_no_family() -> None:
    """What families differ in is told by `model.architecture`."""
    files = [file for folder in OF_NO_FAMILY for file in sorted((ROOT / "src/triforce" / folder).rglob("*.py"))]
    named = {file.name: families_in(file.read_text(encoding="utf-8")) for file in files}
    kernels = [file for file in (ROOT / "csrc").rglob("*.?pp")]
    named |= {file.name: set(FAMILY.findall(re.sub("//.*", "", file.read_text(encoding="utf-8")))) for file in kernels}
    assert files and kernels and not {name: words for name, words in named.items() if words}


@pytest.mark.parametrize(("code", "family_names"), [
    ('"""As in Llama."""\nwidth = 3  # of Gemma', set()),
    ('if kind == "gemma3_text": pass', {"gemma3_text"}),
    ("class QwenLayer: pass", {"QwenLayer"}),
])  # fmt: skip
def test_names_of_families_are_found(code: str, family_names: set[str]) -> None:
    assert families_in(code) == family_names

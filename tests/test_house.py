"""Cycles of imports, names that stand twice, names of tests, and what is too long: by tests/data/house.toml."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from tests.helpers import house
from tests.helpers.house import Graph, Tree

ROOT = Path(__file__).parents[1]
HOUSE = tomllib.loads((ROOT / "tests" / "data" / "house.toml").read_text(encoding="utf-8"))
FOLDERS = ("benchmarks", "csrc", "examples", "recipes", "scripts", "src", "tests")
SUFFIXES = {".cpp", ".css", ".hpp", ".html", ".js", ".py", ".pyi", ".sh"}


@pytest.fixture(scope="module")
def tree() -> Tree:
    return house.modules(ROOT / "src" / "triforce")


@pytest.fixture(scope="module")
def graph(tree: Tree) -> Graph:
    return house.imports(tree)


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """All code, by its path."""
    code_files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in code_files}


def test_generated_files_equal_recorded(files: dict[str, str]) -> None:
    assert [path for path, text in files.items() if is_generated(text)] == HOUSE["generated"]


def is_generated(text: str) -> bool:
    return text.startswith("# Generated from ")


def test_import_depth_equals_recorded(graph: Graph) -> None:
    assert house.floors(house.tops(graph)) == HOUSE["floors"]


def test_imports_have_no_cycle(graph: Graph) -> None:
    assert not house.circles(graph)


def test_module_names_stand_twice_for_counterparts_only(tree: Tree) -> None:
    assert house.namesakes(tree) == {tuple(sorted(group)) for group in HOUSE["counterparts"]}


def test_public_class_names_stand_once(tree: Tree) -> None:
    assert not house.namesakes(house.classes(tree))


def test_test_file_names_are_unique(files: dict[str, str]) -> None:
    """Pytest imports each by its last name alone."""
    tests = [path.removesuffix(".py").replace("/", ".") for path in files if "/test_" in path]
    assert not house.namesakes(tests)


ARTICLES = ["a", "an", "the", "it", "its", "they", "this", "that", "these", "those", "and", "but", "so"]
QUESTIONS = ["what", "who", "whose", "whoever", "where", "when", "which", "how", "why", "every", "each", "nobody"]


def badly_named(code: ast.Module) -> list[str]:
    """Test functions that begin with an article, a pronoun or a question, or have fewer than three words."""
    functions = (node for node in ast.walk(code) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    words = {node.name: node.name.split("_")[1:] for node in functions if node.name.startswith("test_")}
    return [name for name, parts in words.items() if len(parts) < 3 or parts[0] in ARTICLES + QUESTIONS]


def test_test_names_say_subject_condition_result(files: dict[str, str]) -> None:
    tests = {path: text for path, text in files.items() if path.startswith("tests/") and path.endswith(".py")}
    badly_named_tests = {path: badly_named(ast.parse(text)) for path, text in tests.items()}
    assert not {path: names for path, names in badly_named_tests.items() if names}


def test_badly_named_tests_are_found() -> None:
    names = ["test_a_pass_is_made", "test_what_it_refuses", "test_small_pool", "test_full_pool_raises", "helper"]
    assert badly_named(ast.parse("\n".join(f"def {name}(): ..." for name in names))) == names[:3]


def test_file_lengths_within_limit(files: dict[str, str]) -> None:
    lines = {path: len(text.splitlines()) for path, text in files.items() if not is_generated(text)}
    assert not {path: count for path, count in lines.items() if count > HOUSE["longest_file"]}


def made(code: dict[str, str]) -> Graph:
    return house.imports({name: ast.parse(text) for name, text in code.items()})


def test_import_depth_is_counted() -> None:
    """The package's own file is none, and modules of one package are one floor."""
    code = {"t": "from t.a import A", "t.a": "import os", "t.b.x": "from t.a import A", "t.b": "from t.b.x import X"}
    graph = house.tops(made(code | {"t.c": "from t.b import X\nfrom t import A", "t.__main__": "import t.c"}))
    assert house.floors(graph) == 4
    assert graph["t.c"] == {"t.b", "t.__init__"}


@pytest.mark.parametrize(
    "code",
    [
        "from t.b import B",
        "def f():\n    from t import b",
        "if TYPE_CHECKING:\n    import t.b",
        "from t.c import C",
        "from t import T",
    ],
)
def test_import_cycles_are_found(code: str) -> None:
    modules = {"t": "import t.b", "t.b": "from t.a import A", "t.c": "import t.b", "t.d": "import t.a"}
    (circle,) = house.circles(made(modules | {"t.a": code}))
    assert {"t.a", "t.b"} <= set(circle) and "t.d" not in circle
    assert not house.circles(made(modules | {"t.a": "import os"}))


def test_package_cycles_are_refused() -> None:
    with pytest.raises(ValueError, match="cycle"):
        house.floors(house.tops(made({"t.a.x": "import t.b.x", "t.a.y": "", "t.b.x": "", "t.b.y": "import t.a.y"})))


def test_equal_names_are_found() -> None:
    assert house.namesakes(["t.b.pool", "t.a.pool", "t.a", "t.b.a"]) == {("t.a", "t.b.a"), ("t.a.pool", "t.b.pool")}
    tree = {"t.a": ast.parse("class A: ...\nclass _B: ..."), "t.b": ast.parse("class A: ...\nclass _B: ...")}
    assert house.namesakes(house.classes(tree)) == {("t.a.A", "t.b.A")}


def test_relative_imports_are_refused() -> None:
    with pytest.raises(AssertionError, match="absolute"):
        made({"t.a": "from . import b"})

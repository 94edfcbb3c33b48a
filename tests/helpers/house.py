"""What the house rules look at: who imports whom, names that are used twice, what is long. Code is read, not run.

A tree is {dotted name: parsed module}, a graph {name: names that it imports}. What is imported by a name that is made
while running is not seen.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

Tree = dict[str, ast.Module]
Graph = dict[str, set[str]]
Groups = set[tuple[str, ...]]


def modules(source: Path) -> Tree:
    """Those of the package in this folder; a package has the name of its folder."""
    tree = {}
    for file in source.rglob("*.py"):
        parts = file.relative_to(source.parent).with_suffix("").parts
        tree[".".join(parts).removesuffix(".__init__")] = ast.parse(file.read_text(encoding="utf-8"))
    return tree


def imports(tree: Tree) -> Graph:
    """Of modules of the tree, wherever they are imported: in functions and for type checking, too."""
    return {name: {home(target, tree) for target in imported(code)} - {"", name} for name, code in tree.items()}


def imported(code: ast.Module) -> Iterator[str]:
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def home(name: str, module_names: Iterable[str]) -> str:
    """The module that `name` is, or is in; nothing where it is none of those known."""
    while name and name not in module_names:
        name = name.rpartition(".")[0]
    return name


def tops(graph: Graph) -> Graph:
    """Between modules and packages right below the root, whose own file is its `__init__`."""

    def top(name: str) -> str:
        return ".".join(name.split(".")[:2]) if "." in name else f"{name}.__init__"

    graph_of_tops: Graph = defaultdict(set)
    for name, targets in graph.items():
        graph_of_tops[top(name)] |= {top(target) for target in targets} - {top(name)}
    return graph_of_tops


def floors(graph: Graph) -> int:
    """How many names the longest path of imports has, without the `__init__`, which only hands on; a circle raises."""
    heights: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        heights[name] = 0 if name.endswith(".__init__") else 1 + max(map(heights.__getitem__, graph[name]), default=0)
    return max(heights.values())


def circles(graph: Graph) -> Groups:
    """Largest groups in which each name imports all others in the end."""
    reached = {name: below(graph, name) for name in graph}
    return {tuple(sorted(target for target in reached[name] if name in reached[target])) for name in graph} - {()}


def below(graph: Graph, name: str) -> set[str]:
    reached: set[str] = set()
    todo = [name]
    while todo:
        new = graph[todo.pop()] - reached
        reached |= new
        todo += new
    return reached


def namesakes(names: Iterable[str]) -> Groups:
    """Dotted names that end alike."""
    by_last_name: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        by_last_name[name.rpartition(".")[2]].append(name)
    return {tuple(group) for group in by_last_name.values() if len(group) > 1}


def classes(tree: Tree) -> Iterator[str]:
    """Dotted names of the public ones."""
    for name, code in tree.items():
        class_names = (node.name for node in ast.walk(code) if isinstance(node, ast.ClassDef))
        yield from (f"{name}.{class_name}" for class_name in class_names if not class_name.startswith("_"))

"""Facts for the house rules: imports, names that are used twice, lengths. Code is parsed, not run.

A tree is {dotted name: parsed module}, a graph {name: names that it imports}. Imports by computed names are not seen.
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
    """Return the modules of the package in this folder; a package has the name of its folder."""
    tree = {}
    for file in source.rglob("*.py"):
        parts = file.relative_to(source.parent).with_suffix("").parts
        tree[".".join(parts).removesuffix(".__init__")] = ast.parse(file.read_text(encoding="utf-8"))
    return tree


def imports(tree: Tree) -> Graph:
    """Return the imports among modules of the tree, also those in functions and for type checking."""
    return {name: {home(target, tree) for target in imported(code)} - {"", name} for name, code in tree.items()}


def imported(code: ast.Module) -> Iterator[str]:
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def home(name: str, module_names: Iterable[str]) -> str:
    """Return the module that `name` is or is in, "" if none of `module_names` is."""
    while name and name not in module_names:
        name = name.rpartition(".")[0]
    return name


def tops(graph: Graph) -> Graph:
    """Return the graph of modules and packages right below the root, whose own file is its `__init__`."""

    def top(name: str) -> str:
        return ".".join(name.split(".")[:2]) if "." in name else f"{name}.__init__"

    graph_of_tops: Graph = defaultdict(set)
    for name, targets in graph.items():
        graph_of_tops[top(name)] |= {top(target) for target in targets} - {top(name)}
    return graph_of_tops


def floors(graph: Graph) -> int:
    """Return the number of names on the longest import path, without the `__init__`, which only re-exports.

    Raises ValueError for a cycle.
    """
    heights: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        heights[name] = 0 if name.endswith(".__init__") else 1 + max(map(heights.__getitem__, graph[name]), default=0)
    return max(heights.values())


def circles(graph: Graph) -> Groups:
    """Return the largest groups of names that import each other, directly or not."""
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
    """Return groups of dotted names with the same last part."""
    by_last_name: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        by_last_name[name.rpartition(".")[2]].append(name)
    return {tuple(group) for group in by_last_name.values() if len(group) > 1}


def classes(tree: Tree) -> Iterator[str]:
    """Yield the dotted names of public classes."""
    for name, code in tree.items():
        class_names = (node.name for node in ast.walk(code) if isinstance(node, ast.ClassDef))
        yield from (f"{name}.{class_name}" for class_name in class_names if not class_name.startswith("_"))

"""Lint of docstrings: first words, shapes of returned tensors, raised errors.

Code is read, not run. A fault is (kind, qualified name), such as ("shape", "triforce.session.Session.ask").
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

PRONOUNS = "what those these that this it its they their them he she who whose whom which nobody nothing none"
CONNECTIVES = "and or but so nor where when how why of from for by as at in on with to into not"
REFUSED = frozenset(f"{PRONOUNS} {CONNECTIVES}".split())
"""Forbidden first words: neither a verb nor the beginning of a noun phrase. `Whether` is allowed."""
SHAPE = re.compile(r"\((?:[A-Z][A-Za-z0-9 /*+-]*|\.\.\.|\d+)(?:,[^()]*)?\)|scalar|shape")
"""Shapes such as (B, J, V), (N,), (B) or (L, 1, ...)."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Fault = tuple[str, str]


def faults(tree: Mapping[str, ast.Module], errors: frozenset[str]) -> Iterator[Fault]:
    """Yield faults of modules by their dotted names. `errors`: exceptions that a docstring must name."""
    for name, module in tree.items():
        yield from _first_word(module, name)
        yield from _members(module, name, errors, public=True)


def _members(parent: ast.Module | ast.ClassDef, name: str, errors: frozenset[str], *, public: bool) -> Iterator[Fault]:
    for node in parent.body:
        if isinstance(node, ast.ClassDef):
            yield from _first_word(node, f"{name}.{node.name}")
            yield from _members(node, f"{name}.{node.name}", errors, public=public and not node.name.startswith("_"))
        elif isinstance(node, Function):
            yield from _function(node, f"{name}.{node.name}", errors, public=public and not node.name.startswith("_"))


def _function(node: Function, name: str, errors: frozenset[str], *, public: bool) -> Iterator[Fault]:
    yield from _first_word(node, name)
    docstring = ast.get_docstring(node) or ""
    if public and _gives_tensor(node) and docstring and not (SHAPE.search(docstring) or _is_protocol(node)):
        yield "shape", name
    missing = {error for error in raised(node) & errors if error not in docstring}
    if public and docstring and missing and "TriforceError" not in docstring:
        yield "raises", name
    for inner in node.body:
        if isinstance(inner, Function):
            yield from _first_word(inner, f"{name}.{inner.name}")


def _first_word(node: ast.Module | ast.ClassDef | Function, name: str) -> Iterator[Fault]:
    words = (ast.get_docstring(node) or "Nothing said").split()
    if words[0].strip("`\"',.:;()").lower() in REFUSED and ast.get_docstring(node):
        yield "first word", name


def _gives_tensor(node: Function) -> bool:
    return node.returns is not None and ast.unparse(node.returns) in ("Array", "Tensor")


def _is_protocol(node: Function) -> bool:
    """Whether the function has no body, as in a protocol: its implementations say more."""
    statements = node.body[1:]
    return all(
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) for statement in statements
    )


def raised(node: Function) -> set[str]:
    """Return the names of exceptions that a function raises itself."""
    calls = (descendant.exc for descendant in ast.walk(node) if isinstance(descendant, ast.Raise))
    return {call.func.id for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}

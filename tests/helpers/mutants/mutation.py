"""A mutant is the code with one fault planted in it, for the length of a test that must notice.

Targets are written `package.module:Class.name`, so that the registry imports nothing that it names.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def resolve(target: str) -> tuple[Any, str]:
    """The owner of what `target` names, and its name there. The owner is a module, a class or a dictionary."""
    module, _, path = target.partition(":")
    owner: Any = import_module(module)
    *parents, name = path.split(".")
    for each in parents:
        owner = owner[each] if isinstance(owner, dict) else getattr(owner, each)
    return owner, name


def changed(source: str, changes: tuple[tuple[str, str], ...], where: str) -> str:
    """`source` with each `old`, which must occur exactly once, become its `new`."""
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} is not once in {where}"
        source = source.replace(old, new)
    return source


class Edit:
    """Changes the source of one function or property."""

    def __init__(self, target: str, *changes: tuple[str, str]) -> None:
        self.target, self.changes = target, changes

    def function(self) -> Any:
        owner, name = resolve(self.target)
        found = inspect.getattr_static(owner, name)
        source = textwrap.dedent(inspect.getsource(found.fget if isinstance(found, property) else found))
        module, names = inspect.getmodule(owner), {}
        code = changed(source, self.changes, self.target)
        exec(compile(code, f"<broken {name}>", "exec"), vars(module), names)
        return names[name]

    check = function

    def apply(self, patch: pytest.MonkeyPatch, folder: Path | None) -> None:
        patch.setattr(*resolve(self.target), self.function())


class Swap:
    """Puts `make(original)` in the place of a function or a value."""

    def __init__(self, target: str, make: Callable[[Any], Any]) -> None:
        self.target, self.make = target, make

    def check(self) -> Any:
        owner, name = resolve(self.target)
        return owner[name] if isinstance(owner, dict) else getattr(owner, name)

    def apply(self, patch: pytest.MonkeyPatch, folder: Path | None) -> None:
        owner, name = resolve(self.target)
        put = patch.setitem if isinstance(owner, dict) else patch.setattr
        put(owner, name, self.make(self.check()))


class ModuleEdit:
    """Changes the source of a module of jitted functions; modules in `users` get what they import from it anew."""

    def __init__(self, target: str, *changes: tuple[str, str], users: tuple[str, ...]) -> None:
        self.target, self.changes, self.users = target, changes, users

    def check(self) -> str:
        return changed(inspect.getsource(import_module(self.target)), self.changes, self.target)

    def apply(self, patch: pytest.MonkeyPatch, folder: Path | None) -> None:
        """Writes the module to `folder`, as Triton reads sources of functions from files."""
        assert folder
        path = folder / "broken.py"
        path.write_text(self.check())
        spec = importlib.util.spec_from_file_location("broken", path)
        assert spec and spec.loader
        broken = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "broken", broken)
        spec.loader.exec_module(broken)
        original: ModuleType = import_module(self.target)
        for user in map(import_module, self.users):
            for name, value in vars(broken).items():
                if name in vars(original) and vars(user).get(name) is vars(original)[name]:
                    patch.setattr(user, name, value)


@dataclass(frozen=True)
class Mutant:
    """One fault, and the test (`path::function`) that notices it. `checks` are those of its checks that must fail."""

    name: str
    test: str
    edits: tuple[Edit | Swap | ModuleEdit, ...]
    checks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    def apply(self, patch: pytest.MonkeyPatch, folder: Path | None = None) -> None:
        for edit in self.edits:
            edit.apply(patch, folder)

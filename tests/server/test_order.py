"""Inside `server/` imports go one way too: down the list in its docstring, which is read here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import triforce.server

FOLDER = Path(triforce.server.__file__).parent
ORDER = re.findall(r"^- `(\w+)`", triforce.server.__doc__ or "", re.MULTILINE)


def imported(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triforce.server"):
            below = (node.module or "").removeprefix("triforce.server").removeprefix(".")
            names |= {below} if below else {alias.name for alias in node.names}
    return names


def test_the_list_names_all_there_is() -> None:
    assert sorted(ORDER) == sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "__init__")


def test_each_imports_only_what_stands_above_it() -> None:
    for place, name in enumerate(ORDER):
        assert imported(FOLDER / f"{name}.py") <= set(ORDER[:place]), name


def test_files_are_small() -> None:
    assert all(len(file.read_text().splitlines()) < 200 for file in FOLDER.glob("*.py"))

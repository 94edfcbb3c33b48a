"""Code of pages: Python compiles and runs, commands are understood, and functions that pages name are there."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import pages
from tests.helpers.pages import ROOT, Block
from triforce.checkpoint.model_families import FAMILIES
from triforce.cli.parser import parse
from triforce.engine.tier_builder import MODES
from triforce.kvcache.selection import POLICIES

BLOCKS = {
    f"{page.relative_to(ROOT)}-{i}": block
    for page in pages.pages()
    for i, block in enumerate(pages.blocks(page.read_text(encoding="utf-8")))
}
SHELL = {name: block for name, block in BLOCKS.items() if block.language == "sh"}
RUN = {name: block for name, block in BLOCKS.items() if block.run}
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def understood(line: str) -> bool:
    """Whether a line of a shell block names what exists; other programs are taken at their word."""
    program, *arguments = shlex.split(line, comments=True) or ["true"]
    match program.rpartition("/")[2], arguments:
        case "triforce", _:
            return _parsed(arguments)
        case "make", _:
            return all(word in TARGETS or "=" in word for word in arguments)
        case "python", ["-m", module, *_]:
            homes = [home.joinpath(*module.split(".")) for home in (ROOT, ROOT / "src")]
            return any(home.is_dir() or home.with_suffix(".py").exists() for home in homes)
        case "python", [script, *_]:
            return (ROOT / script).exists()
    return True


def _parsed(arguments: list[str]) -> bool:
    try:
        parse(arguments)
    except SystemExit:
        return False
    return True


def test_pages_have_code() -> None:
    assert len(RUN) >= 6 and len(SHELL) >= 20
    assert {block.language for block in BLOCKS.values()} == {"python", "sh", "text"}


@pytest.mark.parametrize("block", [b for b in BLOCKS.values() if b.language == "python"], ids=lambda b: b.code[:30])
def test_python_of_pages_compiles(block: Block) -> None:
    ast.parse(block.code)


@pytest.mark.parametrize("name", SHELL)
def test_commands_of_pages_are_understood(name: str) -> None:
    assert [line for line in pages.commands(SHELL[name].code) if not understood(line)] == []


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_within_sentences_are_understood(page: Path) -> None:
    named = re.findall(r"`((?:make|python -m|python scripts/)[^`]*)`", page.read_text(encoding="utf-8"))
    assert [line for line in named if not re.search("[A-Z.]{4}", line) and not understood(line)] == []


@pytest.mark.parametrize(
    "line", [".venv/bin/triforce generate --nothing", "make nothing", "python -m benchmarks.nothing"]
)
def test_wrong_command_is_found(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not understood(line)
    assert understood(".venv/bin/triforce generate --seed 7 # why") and understood('make test ARGS="-k law"')


@pytest.fixture
def registries() -> Iterator[None]:
    """What examples add to is afterwards as it was."""
    kept = [(registry, dict(registry)) for registry in (FAMILIES, MODES, POLICIES)]
    yield
    for registry, before in kept:
        registry.clear()
        registry.update(before)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RUN)
@pytest.mark.usefixtures("registries")
def test_python_of_pages_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(RUN[name].code, name, "exec"), {"__name__": "__main__"})


def functions(file: Path) -> set[str]:
    """Return the names of functions that a file defines, those of classes with their class."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".cpp":
        return set(
            re.findall(r"^[\w:<>*& ]*?\b((?:\w+::)?\w+)\([^;]*?\) (?:const )?\{$", text, re.MULTILINE | re.DOTALL)
        )
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_seven_questions_name_functions_that_exist() -> None:
    text = (ROOT / "docs" / "contributing" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]*\? \| `([^`]+)` \| `([^`]+)` \|$", text, re.MULTILINE)
    assert len(rows) == 7
    for file, function in rows:
        home = ROOT if file.startswith("csrc/") else ROOT / "src" / "triforce"
        assert function in functions(home / file), f"{file} has no {function}"
    assert "RetrievalView.nothing" not in functions(ROOT / "src" / "triforce" / "kvcache" / "views" / "retrieval.py")

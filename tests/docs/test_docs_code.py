"""Code of pages: Python compiles and runs, commands are understood, and functions that pages name are there."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import page_shell, pages, prose
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
RUN = {name: block for name, block in BLOCKS.items() if block.mark and not page_shell.runs_in_shell(block)}
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def understood(line: str) -> bool:
    """Return whether a line of a shell block names existing commands; other programs are not checked."""
    return all(_understood(command) for command in simple_commands(line))


def simple_commands(line: str) -> list[list[str]]:
    """Return the words of each command of a line, without redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if not set(word) <= set("|&;()<>"):
            commands[-1].append(word)
        elif set(word) & set("<>"):
            next(lexer)  # the file
        else:
            commands.append([])
    return [command for command in commands if command]


def _understood(command: list[str]) -> bool:
    program, *arguments = command
    match program.rpartition("/")[2], arguments:
        case "triforce", _:
            return _parsed(arguments)
        case "make", _:
            return all(word in TARGETS or "=" in word for word in arguments)
        case "python", ["-m", module, *_]:
            homes = [home.joinpath(*module.split(".")) for home in (ROOT, ROOT / "src")]
            return any(home.is_dir() or home.with_suffix(".py").exists() for home in homes)
        case "python", [script, *_] if script not in ("-", "-c"):
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
    assert understood(".venv/bin/triforce generate a > b && true | cat") and not understood("cat < b | make nothing")


@pytest.fixture
def registries() -> Iterator[None]:
    """Restore the registries that examples add to."""
    copies = [(registry, dict(registry)) for registry in (FAMILIES, MODES, POLICIES)]
    yield
    for registry, entries in copies:
        registry.clear()
        registry.update(entries)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RUN)
@pytest.mark.usefixtures("registries")
def test_python_of_pages_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(RUN[name].code, name, "exec"), {"__name__": "__main__"})


NAMED = re.compile(r"`((?:\w+/)+\w+\.(?:py|cpp)): ([\w.:]+(?:, [\w.:]+)*)`")
"""Definitions of a file, as pages name them: `file: name, name`, a method with its class."""


def definitions(file: Path) -> set[str]:
    """Return the names of functions and classes that a file defines, those of methods with their class."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".cpp":
        return set(
            re.findall(r"^[\w:<>*& ]*?\b((?:\w+::)?\w+)\([^;]*?\) (?:const )?\{$", text, re.MULTILINE | re.DOTALL)
        )
    names = set()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.parse(text).body:
        if isinstance(node, (*functions, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{member.name}" for member in node.body if isinstance(member, functions)}
    return names


def missing(text: str) -> list[str]:
    """Return what a page says to stand in a file, and does not."""
    wrong = []
    for file, names in NAMED.findall(text):
        source = next((home / file for home in (ROOT, ROOT / "src" / "triforce") if (home / file).exists()), None)
        defined = definitions(source) if source else set()
        wrong += [f"{file}: {name}" for name in names.split(", ") if name not in defined]
    return wrong


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_definitions_that_page_names_exist(page: Path) -> None:
    assert missing(page.read_text(encoding="utf-8")) == []


def test_missing_definition_is_found() -> None:
    assert missing("`kvcache/pool.py: PagePool.prepare_pass, PagePool.uncover`") == [
        "kvcache/pool.py: PagePool.uncover"
    ]
    assert missing("`kvcache/pond.py: PagePool` `csrc/decoder.cpp: Decoder::forward, Decoder::backward`") == [
        "kvcache/pond.py: PagePool",
        "csrc/decoder.cpp: Decoder::backward",
    ]


def test_questions_are_answered_shortly_by_definitions() -> None:
    """At most four sentences, or items of a list, each question; all of them name what stands in a file."""
    text = (ROOT / "docs" / "contributing" / "architecture.md").read_text(encoding="utf-8")
    answers = dict(re.findall(r"^### ([^\n]*\?)\n\n(.*?)(?=^#)", text, re.MULTILINE | re.DOTALL))
    assert len(answers) >= 10
    for question, answer in answers.items():
        assert NAMED.search(answer), question
        sentences = [prose.END.split(paragraph) for paragraph in prose.paragraphs(answer)]
        assert (len(sentences) if answer.startswith("- ") else sum(map(len, sentences))) <= 4, question

"""Paths of options as a shell leaves them: `~` is the home folder, also behind `=`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.command_line import exit_code
from triforce.cli.arguments import Parser
from triforce.cli.options import path, path_or_standard
from triforce.cli.parser import build_parser

PATHS = {"FILE", "FOLDER", "PATH", "DOC", "DRAFT", "OUT", "SCHEMA"}


def leaves(parser: Parser) -> Iterator[Parser]:
    """Yield the parsers that no command follows."""
    if not parser.commands:
        yield parser
    for subparser in parser.commands.values():
        yield from leaves(subparser)


def test_paths_of_all_options_are_read_alike() -> None:
    """In a path that is not expanded `~` stays; and every option that names files declares it."""
    options = {
        (parser.prog, action.dest): action
        for parser in leaves(build_parser())
        for action in parser._actions
        if str(action.metavar) in PATHS
    }
    assert len(options) > 30
    assert [name for name, action in options.items() if action.type not in (path, path_or_standard)] == []


@pytest.mark.parametrize("read", [path, path_or_standard])
def test_home_folder_is_expanded(read: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(read)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("~/notes.txt") == str(tmp_path / "notes.txt") and read("~") == str(tmp_path)
    assert [read(name) for name in ("./-", "a/~/b", "./~b")] == ["./-", "a/~/b", "./~b"]
    with pytest.raises(argparse.ArgumentTypeError, match="no such home folder; write the path without ~"):
        read("~no-user-of-that-name/notes.txt")


def test_prompt_in_home_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert exit_code(["generate", "--prompt-file=~/missing.txt"]) == 2
    assert f"{tmp_path / 'missing.txt'} cannot be read" in capsys.readouterr().err

"""Names of files that a terminal would obey: they are printed with escapes, on their lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers import watched_folder
from tests.helpers.tty import Tty
from tests.helpers.watched_folder import WORDS, watch_once, write
from triforce.cli import main
from triforce.cli.progress import report_loading
from triforce.tables import Table

folder = watched_folder.folder  # a fixture
ODD = "odd\n\x1b[31mname.txt"


def test_odd_file_name_is_told_by_watch_with_escapes(pair: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder / ODD, WORDS * 20, 3)
    monkeypatch.setattr(sys, "stderr", Tty())
    assert watch_once(pair, folder, folder.with_name("cache"), "--each") == 0
    lines = sys.stderr.getvalue().split("\n")  # type: ignore[attr-defined]
    (line,) = (line for line in lines if "name.txt" in line)
    assert r"odd\n\x1b[31mname.txt: " in line and "\x1b[31m" not in line


def test_odd_model_and_cache_are_told_with_escapes(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ODD).symlink_to(pair / "target")
    monkeypatch.setattr(sys, "stderr", Tty())
    report_loading(str(tmp_path / ODD))
    command = ["generate", str(tmp_path / ODD), "-p", "the cat", "--max-tokens", "1", "--draft", "none"]
    assert main([*command, "--disk-cache", str(tmp_path / f"cache{ODD}")]) == 0
    stderr = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[31m" not in stderr and stderr.count(r"\n\x1b[31mname.txt") >= 3


def test_odd_names_in_output_of_info_and_in_tables_are_escaped(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ODD).symlink_to(pair / "target")
    assert main(["info", str(tmp_path / ODD)]) == 0
    table = Table(ODD, "a note", ["text", "tokens"], [[ODD, "1"]]).plain()
    for printed in (capsys.readouterr().out, table):
        assert "\x1b" not in printed and r"odd\n\x1b[31mname.txt" in printed

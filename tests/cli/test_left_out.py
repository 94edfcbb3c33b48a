"""Files of a folder that no command reads: each command names them on one line, with the reason."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from triforce.cli.text_files import read_texts
from triforce.disk_cache import documents
from triforce.disk_cache.documents import SkippedFiles, files_of, stamps
from triforce.errors import RequestError

DENIED = PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A text, and a folder with another."""
    (tmp_path / "texts" / "sub").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text("a text")
    (tmp_path / "texts" / "sub" / "b.txt").write_text("another")
    return tmp_path / "texts"


@pytest.fixture
def deny(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Deny opening and listing a path, which the system does not deny to root."""

    def denied(path: Path) -> None:
        for name in ("open", "scandir", "listdir"):
            real = getattr(os, name)

            def call(where: Any, *rest_args: Any, _real: Any = real, **how: Any) -> Any:
                if not isinstance(where, int) and Path(where) == path:
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(where))
                return _real(where, *rest_args, **how)

            monkeypatch.setattr(os, name, call)

    return denied


def skip_lines(folder: Path) -> str:
    left_out = SkippedFiles()
    files_of(folder, (), left_out)
    return left_out.summary


def test_unreadable_files_and_folders_are_told(folder: Path, deny: Callable[[Path], None]) -> None:
    (folder / "secret.txt").write_text("secret")
    deny(folder / "secret.txt")
    deny(folder / "sub")
    assert skip_lines(folder) == "secret.txt, sub (Permission denied)"


def test_unreadable_folder_is_not_called_empty(folder: Path, deny: Callable[[Path], None]) -> None:
    deny(folder)
    for read in (lambda: files_of(folder), lambda: read_texts([str(folder)])):
        with pytest.raises(
            RequestError, match=r"texts cannot be read \(Permission denied\); name a folder of texts that"
        ):
            read()


def test_folder_that_cannot_be_reached_is_said_to_be_denied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise DENIED

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(RequestError, match="Permission denied"):
        stamps(folder)


def test_reasons_stand_behind_names_and_others_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_FILE_BYTES", 1 << 20)
    for n in range(5):
        (folder / f"{n}.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\xff")
    (folder / "nul").write_bytes(b"a text that a NUL\0 is in")
    (folder / "large.txt").write_bytes(b"a" * ((1 << 20) + 1))
    (folder / "link.txt").symlink_to(folder / "a.txt")
    (folder / "linked").symlink_to(folder / "sub")
    os.mkfifo(folder / "pipe")
    (folder / ".hidden").write_bytes(b"\xff")
    (folder / "empty.txt").touch()
    assert skip_lines(folder) == (
        "link.txt, linked (a link, which is not followed); large.txt (larger than 1 MiB); pipe (no regular file); "
        "0.png, 1.png, 2.png and 3 more (not UTF-8 text)"
    )


def test_folders_that_git_cannot_read_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warning = b"warning: could not open directory 'sub/': Permission denied\n"
    done = subprocess.CompletedProcess([], 0, b"a.txt\0", warning)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert skip_lines(folder) == "sub (Permission denied)"


def test_vanished_file_is_not_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_names", lambda *_: iter(["a.txt", "gone.txt"]))
    assert skip_lines(folder) == ""


def test_texts_of_a_folder_leave_out_what_is_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "cafe.txt").write_bytes(b"caf\xe9 noir")
    assert list(read_texts([str(folder)])) == ["a.txt"]
    assert capsys.readouterr().err == (
        f"triforce: warning: left out of {folder}: sub (a subfolder; name it, too); "
        "cafe.txt (in another encoding; perhaps iconv -f LATIN1 -t UTF-8 converts it)\n"
    )
    with pytest.raises(RequestError, match="iconv"):
        read_texts([str(folder / "cafe.txt")])

"""Files and folders that cannot be written: the reason, and the option that names another."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.extras import skip_without_torch
from triforce.cli import exit_code, main
from triforce.disk_cache.folder_checks import require_usable
from triforce.errors import CacheError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `os.access` denies all writing, since root may write anywhere."""
    (tmp_path / "requests.jsonl").write_text("{}\n")
    (tmp_path / "kept.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["doctor"], "triforce-doctor.json cannot be written (permission denied in the folder .); name a file in a "
                     "folder of yours with --out"),
        (["batch", "requests.jsonl"], "name a file in a folder of yours with -o"),
        (["batch", "requests.jsonl", "-o", "kept.jsonl"], "kept.jsonl cannot be written (permission denied); name "
                                                          "another file with -o"),
        (["generate", "x y", "--save-cache", "a.kv"], "(permission denied in the folder .)"),
        (["eval", "--json", "a.json"], "with --json"),
        (["generate", "x y", "--disk-cache", "new"], "new cannot be a disk cache (permission denied in the folder .); "
                                                     "name a folder of yours, or a new one inside a folder that you"),
    ],
)  # fmt: skip
def test_reason_and_option_are_named(
    line: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_without_torch(line[0])
    assert main(line) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_read_only_file_system_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert main(["doctor"]) == 2
    assert "(the file system is read-only)" in capsys.readouterr().err


def test_disk_cache_in_a_folder_that_cannot_be_reached_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object, **how: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as denied:
        denied.setattr(os, "stat", refuse)
        with pytest.raises(CacheError) as raised:
            require_usable(tmp_path / "closed" / "new", network=False)
    assert "(Permission denied); name a folder of yours" in str(raised.value)


def test_error_of_the_system_is_told_without_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), b"some/file")

    assert exit_code(refuse) == 2
    assert capsys.readouterr().err.startswith("triforce: error: some/file cannot be read or written (Permission denied")

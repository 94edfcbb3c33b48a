"""Files appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from triforce.whole_file import whole_file


def test_whole_file_replaces_old_content(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")
    with whole_file(file) as partial:
        partial.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_failed_write_keeps_old_content(tmp_path: Path, error: type[BaseException]) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")
    with pytest.raises(error), whole_file(file) as partial:
        partial.write_text("half")
        raise error
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_linked_file_is_replaced_behind_link(tmp_path: Path) -> None:
    link = tmp_path / "link"
    file = tmp_path / "file"
    link.symlink_to(file)
    with whole_file(link) as partial:
        partial.write_text("new")
    assert link.is_symlink() and file.read_text() == "new"

"""Home folders in names that the command line is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from triforce.cli.options import path, path_or_standard


@pytest.mark.parametrize("read", [path, path_or_standard])
def test_home_folder_in_option_is_found(
    read: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shells expand it in words of their own alone, and not behind the = of an option."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("~/kept") == str(tmp_path / "kept") and read("~") == str(tmp_path)
    assert [read(name) for name in ("~kept", "./~/kept", "kept~")] == ["~kept", "./~/kept", "kept~"]

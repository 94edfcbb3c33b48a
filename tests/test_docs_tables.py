"""Tables of docs/ are those of docs/data/."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from scripts import docs_tables


def test_docs_tables_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs_tables.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("layers", "commands", "orders"), ("gpu_runs", "batches", "rows"), ("kernel_errors", "-19", "-18")],
)
def test_stale_docs_table_is_found_and_written(tmp_path: Path, name: str, old: str, new: str) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(docs_tables.ROOT / "docs", docs, ignore=shutil.ignore_patterns("pictures", "pair"))
    data = docs / "data" / f"{name}.toml"
    data.write_text(data.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    assert docs_tables.main(["--check"], docs) == 1
    assert docs_tables.main(["--check"], docs) == 1, "the check writes nothing"
    assert docs_tables.main([], docs) == docs_tables.main(["--check"], docs) == 0
    assert docs_tables.stale(docs) == {}


def test_docs_page_without_marker_raises() -> None:
    with pytest.raises(ValueError, match="not found"):
        docs_tables.filled("# Design", "layers", "")


def test_docs_named_files_exist() -> None:
    root, gone = docs_tables.ROOT, set()
    for page in [root / "README.md", *(root / "docs").glob("*.md")]:
        for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|cpp|hpp|toml))`", page.read_text(encoding="utf-8")):
            if not any((root / folder / name).exists() for folder in (".", "src/triforce", "docs")):
                gone.add((page.name, name))
    assert not gone

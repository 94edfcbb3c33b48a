"""Generated parts of README.md and docs/ are those of their data."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts import docs_pictures, docs_tables


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """What the tables are made of, in a folder of its own."""
    root = docs_tables.ROOT
    shutil.copytree(root / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("pictures", "pair"))
    shutil.copytree(root / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    shutil.copy(root / "README.md", tmp_path)
    return tmp_path


def test_published_tables_are_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs_tables.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("docs/data/layers.toml", "commands", "orders"),
        ("docs/data/gpu_runs.toml", "batches", "rows"),
        ("docs/data/kernel_errors.toml", "-19", "-18"),
        ("benchmarks/results/documents_cpu.json", '"first": [', '"first": [900, 900, 900, 900, '),
    ],
)
def test_stale_table_is_found_and_written(copied: Path, file: str, old: str, new: str) -> None:
    text = (copied / file).read_text(encoding="utf-8")
    assert old in text
    (copied / file).write_text(text.replace(old, new), encoding="utf-8")
    assert docs_tables.main(["--check"], copied) == 1
    assert docs_tables.main(["--check"], copied) == 1, "the check writes nothing"
    assert docs_tables.main([], copied) == docs_tables.main(["--check"], copied) == 0
    assert docs_tables.stale(copied) == {}


def test_page_without_its_place_is_refused() -> None:
    with pytest.raises(ValueError, match="not found"):
        docs_tables.filled("# Design", "layers", "")


def test_published_pictures_are_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs_pictures.main(["--check"]) == 0, capsys.readouterr().out


def test_stale_pictures_are_found_and_drawn(copied: Path) -> None:
    (copied / "docs" / "pictures").mkdir()
    docs = copied / "docs"
    assert len(docs_pictures.stale(docs)) == 8 and docs_pictures.main(["--check"], docs) == 1
    assert docs_pictures.main([], docs) == docs_pictures.main(["--check"], docs) == 0

"""Generated parts of README.md and docs/ are those of their data, and of the code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts import docs
from scripts.docs_reference import filled


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with a copy of the generated pages and their data."""
    shutil.copytree(docs.ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.png", "pair"))
    shutil.copytree(docs.ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    shutil.copy(docs.ROOT / "README.md", tmp_path)
    return tmp_path


def test_generated_files_are_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(["--check"]) == 0, capsys.readouterr().out


CHANGES = [
    ("docs/data/layers.toml", "commands", "orders", "layout.md"),
    ("docs/data/gpu_runs.toml", "batches", "rows", "gpu.md"),
    ("docs/data/kernel_errors.toml", "-19", "-18", "kernels.md"),
    ("docs/data/level_bits.toml", "copies of weights", "copies", "exactness.md"),
    ("docs/data/gguf_types.toml", "272", "273", "backends.md"),
    ("docs/data/pictures.toml", "a small model", "a model", "tiers.svg"),
    ("benchmarks/results/pair_speed.json", '"context": 512', '"context": 513', "README.md"),
    ("benchmarks/results/draft_speed.json", '"context": 7168', '"context": 8192', "benchmarks.md"),
    ("docs/reference/command-line.md", "| `--seed` `N` |", "| `--seed` `M` |", "command-line.md"),
]
"""A file, what is changed there, and the page that is stale then."""


def test_stale_files_are_found_and_written(copied: Path) -> None:
    for file, old, new, _ in CHANGES:
        text = (copied / file).read_text(encoding="utf-8")
        assert old in text
        (copied / file).write_text(text.replace(old, new), encoding="utf-8")
    assert sorted(path.name for path in docs.stale(copied)) == sorted(stale for *_, stale in CHANGES)
    assert docs.main(["--check"], copied) == 1
    assert docs.main(["--check"], copied) == 1, "the check writes nothing"
    assert docs.main([], copied) == docs.main(["--check"], copied) == 0


def test_page_without_its_place_is_refused() -> None:
    with pytest.raises(ValueError, match="not found"):
        filled("# Design", "layers", "")

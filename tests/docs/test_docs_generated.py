"""Generated parts of README.md and docs/ are those of their data, and of the code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts import docs
from scripts.docs_reference import commands, filled, python


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
    ("docs/data/gpu_runs.toml", "batches", "rows", "gpu-runs.md"),
    ("docs/data/kernel_errors.toml", "-19", "-18", "kernels.md"),
    ("docs/data/level_bits.toml", "copies of weights", "copies", "exactness.md"),
    ("docs/data/gguf_types.toml", "272", "273", "backends.md"),
    ("docs/data/pictures.toml", "a small model", "a model", "tiers.svg"),
    ("benchmarks/results/pair_speed.json", '"context": 512', '"context": 513', "README.md"),
    ("benchmarks/results/draft_speed.json", '"context": 7168', '"context": 8192', "cells.md", "draft.svg"),
    ("docs/reference/command-line.md", "| `--seed` `N` |", "| `--seed` `M` |", "command-line.md"),
    ("docs/tutorial/choosing-a-model.md", "`llama`, `mistral`", "`llama`, `minstrel`", "choosing-a-model.md"),
]
"""A file, what is changed there, and the files that are stale then."""


def test_stale_files_are_found_and_written(copied: Path) -> None:
    for file, old, new, *_ in CHANGES:
        text = (copied / file).read_text(encoding="utf-8")
        assert old in text
        (copied / file).write_text(text.replace(old, new), encoding="utf-8")
    expected = [name for _, _, _, *names in CHANGES for name in names]
    assert sorted(path.name for path in docs.stale(copied)) == sorted(expected)
    assert docs.main(["--check"], copied) == 1
    assert docs.main(["--check"], copied) == 1, "the check writes nothing"
    assert docs.main([], copied) == docs.main(["--check"], copied) == 0


def test_shared_options_of_commands_stand_once() -> None:
    specific, _, shared = commands().partition("## Shared options")
    shared_rows = [line for line in shared.splitlines() if line.startswith("| `-")]
    assert len(shared_rows) > 40 and len(set(shared_rows)) == len(shared_rows)
    assert set(shared_rows).isdisjoint(specific.splitlines())
    for command, reference in (
        ("generate", "- all of [Engine](#engine)\n"),
        ("chat", "- all of [Sampling](#sampling) except `--n`, `--max-tokens`\n"),
        ("bench compare", "- `--draft` of [Engine](#engine)\n"),
    ):
        assert reference in specific.partition(f"## triforce {command}\n")[2].partition("\n## ")[0]


def test_python_reference_explains_every_field_and_attribute() -> None:
    text = python()
    assert [line for line in text.splitlines() if line.startswith("| `") and line.endswith("|  |")] == []
    for name in ("Session", "Engine", "Request", "TokenLogprobs", "PlanReport", "BreakEvenPoint", "Tokenizer"):
        assert f"## {name}\n" in text
    assert "| `end_ids` | `frozenset[int]` |" in text and ") -> list[RequestOutput]\n" in text
    llm = text.partition("## LLM\n")[2].partition("\n## ")[0]
    assert "| attribute | meaning |" in llm and "| `fingerprint` |" in llm


def test_page_without_its_place_is_refused() -> None:
    with pytest.raises(ValueError, match="not found"):
        filled("# Design", "layers", "")

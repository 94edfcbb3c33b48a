"""The study of what is kept of a draft that reads hidden states; mistakes are answered in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import draft_acceptance
from tests.helpers.tiny_training import target_folder, text
from triforce.cli import main

torch.set_num_threads(1)
SIZES = ["--windows", "2", "--tokens", "16", "--steps", "3", "--contexts", "96,160"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft that was hardly trained for it, and texts."""
    folder = tmp_path_factory.mktemp("models")
    target_folder(folder / "target")
    (folder / "target" / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    (folder / "texts").mkdir()
    (folder / "texts" / "book.txt").write_text(text(9000), encoding="utf-8")
    command = ["train-draft", str(folder / "target"), "-o", str(folder / "draft"), "--minutes", "0.01"]
    assert main([*command, "--texts", str(folder / "texts")]) == 0
    return folder


def command(folder: Path, *options: str) -> list[str]:
    models = [str(folder / "target"), "--draft", str(folder / "draft"), "--texts", str(folder / "texts")]
    return [*models, *SIZES, "--quiet", *options]


def test_shares_are_measured_at_each_context(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "draft_acceptance.json"
    assert draft_acceptance.main(command(folder, "--json", str(out))) == 0
    rows = json.loads(out.read_text())["rows"]
    measured_rows = [(row["kind"], row["context"], row["temperature"]) for row in rows]
    kinds = [(kind, context) for context in (96, 160) for kind in ("prose", "answers")]
    assert measured_rows == [(*kind, temperature) for kind in kinds for temperature in ("0", "0.8")]
    assert all(len(row["kept"]) == 3 and 0 <= min(row["kept"]) <= max(row["kept"]) <= 1 for row in rows)
    assert "Acceptance of a draft" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft", "none"], "--draft"),
        (["--contexts", "20"], "--contexts"),
        (["--contexts", "100000"], "positions"),
        (["--windows", "0"], "--windows"),
        (["--tokens", "2"], "--tokens"),
    ],
)
def test_draft_acceptance_mistakes_exit_2(
    folder: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert draft_acceptance.main(command(folder, *options)) == 2
    assert message in capsys.readouterr().err

"""The study of a plain draft: as many bytes, trained and decoded beside one that reads hidden states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import plain_draft
from tests.helpers.tiny_training import target_folder, text
from triforce.cli import main

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft that was hardly trained for it, and texts."""
    folder = tmp_path_factory.mktemp("models")
    target_folder(folder / "target")
    for name in ("trained", "unseen"):
        (folder / name).mkdir()
        (folder / name / f"{name}.txt").write_text(text(9000, seed=len(name)), encoding="utf-8")
    command = ["train-draft", str(folder / "target"), "-o", str(folder / "draft"), "--minutes", "0.01"]
    assert main([*command, "--texts", str(folder / "trained")]) == 0
    return folder


def command(folder: Path, *options: str) -> list[str]:
    texts = ["--train", str(folder / "trained"), "--texts", str(folder / "unseen")]
    models = [str(folder / "target"), "--draft", str(folder / "draft")]
    return [*models, *texts, "--minutes", "0.02", "--windows", "1", "--tokens", "12", "--quiet", *options]


def test_plain_draft_is_trained_and_decoded(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plain_draft.main(command(folder, "--json", str(tmp_path / "rows.json"))) == 0
    report = json.loads((tmp_path / "rows.json").read_text())
    rows = [(row["draft"], row["temperature"]) for row in report["rows"]]
    assert rows == [(name, temperature) for name in ("reads hidden states", "plain") for temperature in (0.0, 0.8)]
    assert all(1 <= row["tokens"] <= 5 for row in report["rows"]) and report["updates"] > 0
    assert report["bytes"] / 2 < 2 * report["plain_parameters"] <= report["bytes"]
    assert "A plain draft" in capsys.readouterr().out


def test_training_of_a_plain_draft_teaches(folder: Path) -> None:
    """The draft's law comes closer to the target's."""
    from triforce.llm import LLM

    training = plain_draft.PlainTraining(LLM(folder / "target", None), {"a": text(9000)}, 60_000, 1)
    ids_BT, final_BTC = next(training._chunks())
    nats = [training._update(ids_BT, final_BTC, 0.0) for _ in range(20)]
    assert nats[-1] < nats[0] - 0.2, nats


def test_plain_draft_beside_a_plain_draft_exits_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plain_draft.main([*command(folder), "--draft", "none"]) == 2
    assert "reads no hidden states" in capsys.readouterr().err

"""`triforce train-draft` from end to end, and what it says to mistakes."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.command_line import exit_code
from tests.helpers.tiny_training import target_folder, text
from triforce.cli import main, train_draft
from triforce.eagle import head_files
from triforce.eagle.head_files import read_eagle_head
from triforce.engine.model_loader import load
from triforce.training.trainer import FILE, Trainer

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text(text(9000), encoding="utf-8")
    return folder


def command(target: Path, texts: Path, draft: Path, minutes: float = 0.01) -> list[str]:
    return ["train-draft", str(target), "-o", str(draft), "--texts", str(texts), "--minutes", str(minutes)]


def test_command_writes_draft_and_prints_card(
    target: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(target, texts, tmp_path / "draft")) == 0
    printed = capsys.readouterr()
    assert "Acceptance of the draft" in printed.out and printed.err == ""  # no terminal
    loaded = load(target, device="cpu")
    draft = read_eagle_head(tmp_path / "draft", loaded.config, loaded.fingerprint)
    assert draft.card == json.loads((tmp_path / "draft" / "config.json").read_text())["triforce"]["card"]
    assert sorted(file.name for file in (tmp_path / "draft").iterdir()) == ["config.json", "model.safetensors"]
    assert main(command(target, texts, tmp_path / "draft")) == 2
    assert "finished draft" in capsys.readouterr().err


def test_interrupted_command_goes_on(
    target: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_update, updates = Trainer._update, list[int]()

    def update(self: Trainer, *update_args: object) -> None:
        if len(updates) == 2:
            raise KeyboardInterrupt
        updates.append(self.state.updates)
        real_update(self, *update_args)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", update)
        assert main(command(target, texts, tmp_path, 60)) == 130
    stderr = capsys.readouterr().err
    assert stderr.startswith("triforce: error: stopped after") and stderr.count("\n") == 1
    assert (tmp_path / FILE).exists()
    assert main(command(target, texts, tmp_path)) == 0 and updates == [0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--minutes", "0"], "--minutes: 0"),
        (["--minutes", "-1"], "more than 0"),
        (["--minutes", "inf"], "(a year) at most"),
        (["--minutes", "1e308"], "--minutes: 1e+308"),
        (["-o", ""], "an empty name"),
        (["-o", "a\0b"], "no folder"),
        (["--texts", "missing"], "missing"),
        (["-o", "/dev/null/draft"], "/dev/null/draft"),
        (["-o", "missing/draft"], "missing/draft cannot be written (No such file or directory); name another folder"),
        (["--device", "cuda"], "--device cuda"),
    ],
)
def test_mistakes_are_one_line(
    change: list[str], message: str, target: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert exit_code([*command(target, texts, tmp_path / "draft"), *change]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.glob("*")), "nothing is written"


def test_text_of_one_byte_is_one_line(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("x")
    assert main(command(target, tmp_path / "a.txt", tmp_path / "draft")) == 2
    error = capsys.readouterr().err
    assert "a training needs" in error and error.count("\n") == 1


def test_full_disk_is_one_line_and_loses_nothing(
    target: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint stays, and the training continues from it."""
    folder, sync, saves = tmp_path / "draft", os.fsync, list[int]()

    def full(file: int) -> None:
        saves.append(file)
        if len(saves) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert main(command(target, texts, folder, 60)) == 2
    stderr = capsys.readouterr().err
    assert "No space left on device" in stderr and stderr.count("\n") == 1
    assert [file.name for file in folder.iterdir()] == [FILE]
    updates = torch.load(folder / FILE, weights_only=True)["updates"]
    with monkeypatch.context() as patch:  # when the draft itself is written
        patch.setattr(head_files, "os", SimpleNamespace(fsync=lambda _: full(0), replace=os.replace))
        assert updates > 0 and main(command(target, texts, folder)) == 2
    stderr = capsys.readouterr().err
    assert "No space left on device" in stderr and stderr.count("\n") == 1
    assert [file.name for file in folder.iterdir()] == [FILE] and main(command(target, texts, folder)) == 0


def test_command_stopped_before_updates_or_card_goes_on(
    target: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*update_args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("triforce.training.trainer.add_induction", interrupted)
        assert main(command(target, texts, tmp_path)) == 130
    assert "before the first update" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr("triforce.training.training_card.measure", interrupted)
        assert main(command(target, texts, tmp_path)) == 130
    assert "goes on from there" in capsys.readouterr().err
    assert main(command(target, texts, tmp_path)) == 0 and "Acceptance of the draft" in capsys.readouterr().out


def test_interrupt_within_pass_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    codes = list[int]()
    monkeypatch.setattr(os, "_exit", codes.append)
    train_draft._exit_now()
    assert codes == [130] and "before the first update" in capsys.readouterr().err

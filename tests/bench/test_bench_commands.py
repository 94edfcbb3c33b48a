"""Parts of `triforce bench` start with nothing but a model, and with what may be said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from triforce.backends import dispatch
from triforce.cli import main
from triforce.cli.bench.setup import load
from triforce.cli.parser import parse


def test_bench_defaults_apply_when_unset(pair: Path) -> None:
    llm = load(parse(["bench", "speed", str(pair / "target"), "--draft", str(pair / "draft")]))
    assert llm.draft and llm.speculation.retrieval.budget.tokens == 2048 and llm.speculation.speculative_tokens == 6


@pytest.mark.parametrize("part", ["acceptance", "locality", "quality"])
def test_studies_are_no_parts(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["bench", part])
    assert "is not known" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["bench", "speed"], ["bench", "start"], ["eval"], ["train-draft", "-o", "draft"]])
def test_measurements_and_training_without_torch_exit_2(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dispatch, "has_torch", lambda: False)
    assert main(command) == 2
    captured = capsys.readouterr()
    assert "need torch, which is not installed; pip install 'triforce[torch]'" in captured.err
    assert captured.err.count("\n") == 1 and not captured.out and not list(tmp_path.iterdir())

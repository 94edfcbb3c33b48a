"""Everyday command lines and their right answers, in tests/data/everyday: the list grows with each report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_line import exit_code
from tests.helpers.extras import skip_without_torch

EVERYDAY = Path(__file__).parents[1] / "data" / "everyday"
CASES = [case for case in json.loads((EVERYDAY / "command_line.json").read_text(encoding="utf-8")) if "line" in case]
TARGET = "TARGET"
"""Stands for the folder of a real model; all other lines meet an engine that remembers what it was asked."""


def name_of(case: dict[str, Any]) -> str:
    return " ".join(case["line"]) + (f" < {case['stdin']}" if "stdin" in case else "")


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_everyday_line_has_its_answer(
    case: dict[str, Any],
    request: pytest.FixtureRequest,
    stdin: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Code, what stderr and stdout have, what the engine was asked, and which files are new; a mistake is one line."""
    engine = None
    line = case["line"]
    skip_without_torch(line[0])
    if TARGET in line:
        models = request.getfixturevalue("pair")
        draft = [] if "--draft" in line else ["--draft", "none"]
        line = [str(models / "target") if argument == TARGET else argument for argument in line] + draft
    elif "engine" not in case:
        engine = request.getfixturevalue("llm")
        engine.called = {}
    shutil.copytree(EVERYDAY / "files", tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    names_before = {path.name for path in Path().iterdir()}
    stdin(Path(case["stdin"]).read_bytes() if "stdin" in case else b"")
    capfd.readouterr()  # of models that are made for the first line that needs them
    code = exit_code(line)
    out, err = capfd.readouterr()
    assert code == case.get("code", 0), err
    assert all(message in err for message in case.get("says", [])), err
    assert all(message in out for message in case.get("out", [])), out
    assert err == case.get("err", err) and "Traceback" not in err
    assert {path.name for path in Path().iterdir()} - names_before == set(case.get("leaves", []))
    if code == 2:
        assert not out and err.startswith("triforce: error: ") and err.count("\n") == 1, err
        assert engine is None or not engine.called
    if "prompt" in case:
        assert engine.called["prompt"] == case["prompt"] and engine.made["model"] == case.get("model")
    for name, value in case.get("params", {}).items():
        actual = getattr(engine.called["params"], name)
        assert (list(actual) if isinstance(actual, tuple) else actual) == value

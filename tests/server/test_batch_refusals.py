"""Messages of `triforce batch` about refused lines, and answers that go into a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.batch_files import arguments, line
from triforce.cli import main
from triforce.server.batch import Tally

ROOT = Path(__file__).parents[2]


def test_refused_lines_are_counted_by_kind(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers of lines and values differ in reasons of one kind."""
    hot = [line(f"hot{n}", "/v1/completions", {"prompt": "x", "temperature": -1.5 - n}) for n in range(3)]
    (tmp_path / "in").write_text("\n".join(["", "[1] 2", "{", *"{{{{", ""]) + "".join(hot))
    assert main(arguments(pair, tmp_path / "in", tmp_path / "out")) == 1
    stderr = capsys.readouterr().err
    assert "5 lines were refused for the commonest reason; the first of them: line 3 is not JSON: Expecting" in stderr
    assert "at column 2" in stderr and "line 1" not in stderr


def test_refused_lines_of_shipped_pair_name_model_argument(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text(line("a", "/v1/completions", {"prompt": "x", "model": "smollm2"}))
    assert main(["batch", str(tmp_path / "in"), "-o", str(tmp_path / "out")]) == 1
    stderr = capsys.readouterr().err
    assert "model 'smollm2' is not served here" in stderr and "triforce batch FILE MODEL" in stderr


def test_refused_lines_with_other_values_are_of_one_kind() -> None:
    tally = Tally()
    tally.refuse("temperature is -1.5, and 'a' is not b", "first")
    assert tally.commonest() == "The reason: first: temperature is -1.5, and 'a' is not b"
    tally.refuse("temperature is 12, and 'c' is not b", "second")
    assert tally.refused == 2
    assert tally.commonest().startswith(
        "2 lines were refused for one reason; the first of them: first: temperature is -1.5"
    )


@pytest.mark.parametrize("output", ["-", "/dev/stdout"])
def test_answers_go_into_a_pipe(output: str, pair: Path, tmp_path: Path) -> None:
    """The pipe is the command's own, so reading it would have no end."""
    body = {"prompt": "the cat", "temperature": 0, "max_tokens": 3}
    (tmp_path / "in.jsonl").write_text(line("a", "/v1/completions", body))
    command = [sys.executable, "-m", "triforce", *arguments(pair, tmp_path / "in.jsonl", Path(output))]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, timeout=300, check=True, env=os.environ | {"PYTHONPATH": paths})
    (answer,) = (json.loads(answer) for answer in done.stdout.splitlines())
    assert answer["custom_id"] == "a" and answer["response"]["status_code"] == 200

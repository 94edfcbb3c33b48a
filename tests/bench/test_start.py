"""Starts, timed in processes of their own: each step, in first and second processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from triforce.bench import shapes, start
from triforce.cli import main
from triforce.engine.model_loader import load
from triforce.errors import RequestError


@pytest.mark.slow
def test_start_times_each_mode_twice(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "start.json"
    models = [str(pair / "target"), "--draft", str(pair / "draft")]
    asked = ["--modes", "ar,triforce", "--prompt-tokens", "700", "--repeats", "1", "--json", str(file)]
    assert main(["bench", "start", *models, *asked]) == 0
    shown = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert "To the first token" in shown and json.loads(shown.splitlines()[-1])["rows"] == report["rows"]
    import_row, *rows = report["rows"]
    assert import_row["mode"] == "import torch" and import_row["seconds"] > 0
    assert [(row["mode"], row["process"]) for row in rows] == [
        (mode, process) for mode in ("ar", "triforce") for process in ("first", "second")
    ]
    for row in rows:
        assert list(row["steps"]) == list(start.STEPS) and all(took >= 0 for took in row["steps"].values())
        assert sum(row["steps"].values()) == pytest.approx(row["seconds"])
        assert row["steps"]["imports"] > row["steps"]["engine"]


def test_start_first_process_is_cold_second_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    cold_flags: list[bool] = []

    def run(command: list[str], environment: dict[str, str]) -> tuple[str, float]:
        if "-c" in command:
            return "", 2.0
        mark = Path(environment["XDG_CACHE_HOME"]) / "mark"
        cold_flags.append(mark.exists())
        mark.touch()
        began = json.loads(command[-1])["began"]
        steps = dict.fromkeys(start.STEPS[:-1], 1.0 + len(cold_flags))
        return json.dumps(steps | {"end": began + 5 * (1.0 + len(cold_flags))}), 5 * (1.0 + len(cold_flags)) + 0.5

    monkeypatch.setattr(start, "_run", run)
    import_row, first_row, second = start.rows(["ar"], {"prompt": "x"}, repeats=3)
    assert cold_flags == [False, True] * 3
    assert (import_row["seconds"], import_row["spread"]) == (2.0, 0.0)
    assert (first_row["seconds"], second["seconds"]) == (pytest.approx(20.5), pytest.approx(25.5))
    assert first_row["spread"] == pytest.approx(20) and first_row["of_import"] == pytest.approx(10.25)
    assert first_row["steps"] == pytest.approx(dict.fromkeys(start.STEPS, 4.0) | {"exit": 0.5})


def test_start_failed_process_reports_last_line(pair: Path) -> None:
    with pytest.raises(RequestError, match=r"mode 'magic' is not known; choose from ar"):
        task = {"model": str(pair / "target"), "draft": None, "device": "cpu", "dtype": "auto", "kv_dtype": "auto"}
        task["weight_inputs"] = "int16"
        list(start.rows(["magic"], task, 1))


def test_start_shape_makes_a_checkpoint_folder(tmp_path: Path) -> None:
    shapes.write("thin32", tmp_path, context=512)
    model = load(tmp_path, device="cpu")
    assert (model.config.layers, model.config.context, model.tokenizer) == (32, 512, None)
    assert model.config.tied and model.decoder.dtype in ("bfloat16", "float32")


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--repeats", "0"], "at least 1"),
        (["--prompt-tokens", "0"], "at least 1"),
        (["--modes", "magic"], "magic"),
        (["--shape", "thin33"], "thin33"),
        (["MODEL", "--shape", "thin32"], "leave out MODEL"),
        (["--prompt-tokens", "10000000"], "smaller --prompt-tokens"),
        (["/no/such/folder"], "there is no folder"),
    ],
)
def test_start_impossible_measurements_are_reported(
    options: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "start", *options]) == 2
    assert wrong in capsys.readouterr().err

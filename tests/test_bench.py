"""`triforce bench`: that the figures are what they say, not how large they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from triforce.bench import kernels, speed, synthetic
from triforce.cli import main
from triforce.kernels import extension


def test_speed_writes_a_row_for_each_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "speed.json"
    cells_asked = ["--contexts", "100,300", "--temperatures", "0,0.6", "--modes", "ar,triforce"]
    few = [*cells_asked, "--tokens", "12", "--repeats", "1"]
    assert main(["bench", "speed", *few, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    cells = [(row["mode"], row["context"], row["temperature"]) for row in report["rows"]]
    assert cells == [(m, c, t) for c in (100, 300) for t in (0.0, 0.6) for m in ("ar", "triforce")]
    for row in report["rows"]:
        assert row["tokens"] == 12 and row["tokens_per_second"] == pytest.approx(12 / row["seconds"])
        assert row["prefill_tokens_per_second"] > 0 and row["spread"] == 0
        assert row["full_passes"] == (12 if row["mode"] == "ar" else row["full_passes"])
        assert row["speedup"] == 1 or row["mode"] != "ar"
    assert report["command"].startswith("triforce ") and report["machine"]
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(cells)


def test_timing_takes_ratios_turn_by_turn() -> None:
    row = speed.timing([1.0, 2.0, 4.0], [2.0, 4.0, 4.0], tokens=8)
    assert row["seconds"] == 2.0 and row["tokens_per_second"] == 4.0
    assert row["speedup"] == 2.0 and row["spread"] == 1.0


def test_repeated_n_grams() -> None:
    assert speed.repeated(list(range(50)), 8) == 0
    assert speed.repeated([1, 2, 3] * 20, 8) == pytest.approx(1 - 3 / 53)
    assert speed.repeated([1], 8) == 0


@pytest.mark.parametrize(("outer", "inner", "tokens_a_pass"), [(1.0, 1.0, 7), (0.0, 0.0, 1)])
def test_synthetic_acceptance_is_what_was_asked_for(outer: float, inner: float, tokens_a_pass: int) -> None:
    """gamma_1 = 2, gamma_2 = 6: twice two guesses and a bonus token, which makes 6, and one token of the full tier."""
    plain, fast = synthetic.rows([256], outer, inner, (2, 6), budget=64, tokens=32, repeats=1)
    assert plain["mode"] == "ar" and plain["full_passes"] == 32
    assert fast["acceptance"] == {"synthetic": True, "outer": outer, "inner": inner}
    assert 32 / fast["full_passes"] == pytest.approx(tokens_a_pass, rel=0.25)


def test_kernels_are_compared_with_the_bandwidth_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SECONDS", 0.001)
    rows = list(kernels.rows([512], ["30m"]))
    assert rows[0]["kernel"] == "read" and rows[0]["fraction"] == 1
    steps = [row for row in rows if row["kernel"] == "step"]
    assert [row["width"] for row in steps] == [1, 8, 16]
    moved = {row["bytes"] for row in steps}
    assert moved == {2 * (8 * (4 * 512 * 512 + 3 * 512 * 1408) + 8192 * 512) + 512 * 16 * 1024}
    for row in rows[1:]:
        if "bytes" in row:
            assert row["fraction"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9 / rows[0]["gb_per_second"])
    assert {row["kernel"] for row in rows} >= {
        "retrieval step",
        *(["retrieval step, int8"] if extension.native else []),
        "prefill attention",
        "prefill attention, torch",
        "sampler",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed", "--modes", "ar,magic"], "magic"),
        (["speed", "--contexts", "100000000"], "--texts"),
        (["speed", "--texts", "nowhere.txt"], "nowhere.txt"),
        (["speed", "--json", "no/such/folder/x.json"], "folder that exists"),
        (["speed", "--contexts=-5"], "at least 2 tokens"),
        (["speed", "--repeats", "0"], "at least 1"),
        (["speed", "--synthetic", "0.9"], "OUTER,INNER"),
        (["speed", "--synthetic", "2,0.5"], "OUTER,INNER"),
        (["speed", "--synthetic", "0.9,0.5", "--budget", "3%"], "in tokens"),
        (["kernels", "--shapes", "70b"], "70b"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error

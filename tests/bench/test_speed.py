"""`triforce bench`: that the figures are what they say, not how large they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from triforce.backends import dispatch
from triforce.bench import kernels, speed
from triforce.bench.prompts import PromptCache, Sources, generate_batch, prompts
from triforce.bench.roofline import Roofline, Work
from triforce.bench.speed import Cell, speedup, verdict
from triforce.cli import main
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

FEW = ["--tokens", "6", "--repeats", "1", "--modes", "ar,triforce,auto"]
FIELDS = {
    "mode", "context", "batch", "temperature", "workload", "tokens", "seconds", "tokens_per_second",
    "prefill_tokens_per_second", "speedup", "spread", "acceptance", "full_passes",
}  # fmt: skip


def test_speed_writes_row_per_cell(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "speed.json"
    axes = ["--contexts", "300,512", "--batches", "1,3", "--temperatures", "0.6", "--workloads", "code,needle"]
    assert bench("speed", *axes, *FEW, "--json", str(file)) == 0
    report = json.loads(file.read_text())
    cells = {(row["context"], row["batch"], row["workload"], row["mode"]) for row in report["rows"]}
    assert cells == set(product((300, 512), (1, 3), ("code", "needle"), ("ar", "triforce", "auto")))
    for row in report["rows"]:
        assert row.keys() >= FIELDS and row["prompt_tokens"] == row["context"]
        assert row["tokens"] == 6 * row["batch"] and row["same_text_as_ar"]
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["prefill_tokens_per_second"] > 0 and row["spread"] == 0 and row["turns"] == 1
        assert row["mode"] != "ar" or (row["full_passes"] == row["tokens"] and row["speedup"] == 1)
    assert report["command"].startswith("triforce ") and report["machine"]
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == verdict(report["rows"]) and last["cells"] == 8


def test_speed_resumes_after_interruption(
    bench: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, caches, measured = tmp_path / "speed.json", tmp_path / "caches", []
    honest = speed.cell_rows

    def counting(llm: Any, texts: Any, cell: Any, *rest: Any) -> list[Any]:
        measured.append(str(cell))
        if cell.context > 300 and len(measured) == 2:
            raise KeyboardInterrupt
        return honest(llm, texts, cell, *rest)

    monkeypatch.setattr(speed, "cell_rows", counting)
    asked = ["--contexts", "300,400", "--temperatures", "0", *FEW, "--json", str(file), "--caches", str(caches)]
    assert bench("speed", *asked) == 130  # interrupted
    first = json.loads(file.read_text())["rows"]
    assert {row["cell"] for row in first} == {"300-b1-t0-books"} and (caches / "books-300.kv").exists()
    assert bench("speed", *asked) == 0
    assert measured == ["300-b1-t0-books", "400-b1-t0-books", "400-b1-t0-books"]
    assert json.loads(file.read_text())["rows"][: len(first)] == first
    assert bench("speed", *asked[:-6], "--tokens", "7", "--json", str(file)) == 2
    assert "was measured otherwise (tokens" in capsys.readouterr().err
    assert bench("speed", *asked, "--dtype", "bfloat16") == 2
    assert "was measured otherwise (dtype)" in capsys.readouterr().err
    report = json.loads(file.read_text())
    file.write_text(json.dumps(report | {"level": "another"}))
    assert bench("speed", *asked) == 2
    assert "was measured otherwise (level)" in capsys.readouterr().err
    file.write_text("[1, 2")
    assert bench("speed", *asked) == 2 and "not a file of results" in capsys.readouterr().err


def test_batched_texts_equal_single_texts(llm: LLM, sources: Sources) -> None:
    """Row n draws by the seed and n."""
    texts = prompts(sources, "copy", 300, 3)
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)
    for mode in ("ar", "triforce"):
        whole = generate_batch(llm, texts, params, mode)
        for n, (text, output) in enumerate(zip(texts, whole.outputs, strict=True)):
            alone = generate_batch(llm, [text], replace(params, seed=5 + n), mode)
            assert alone.outputs[0].token_ids == output.token_ids
        assert whole.outputs[0].token_ids != whole.outputs[1].token_ids


def test_saved_prompt_keeps_texts(llm: LLM, sources: Sources, tmp_path: Path) -> None:
    texts = prompts(sources, "books", 300, 2)
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)
    kept = PromptCache(llm, tmp_path, lambda: lambda done, total: None)
    earlier, speed_of_prefill = kept.load("x", texts[0])
    read = generate_batch(llm, texts, params, "triforce", earlier)
    assert [o.token_ids for o in read.outputs] == [
        o.token_ids for o in generate_batch(llm, texts, params, "triforce").outputs
    ]
    assert kept.load("x", texts[0])[1] == speed_of_prefill > 0
    assert kept.load("x", texts[0][1:])[1] != speed_of_prefill  # another prompt of that name is not what was read
    kept.drop("x")
    assert not list(tmp_path.iterdir())


def test_turns_are_prepared_one_by_one(llm: LLM, sources: Sources, tmp_path: Path) -> None:
    begun, texts = [], prompts(sources, "books", 200, 1)
    saved, _ = PromptCache(llm, tmp_path, lambda: lambda done, total: None).load("books", texts[0])
    turns = speed.SpeedConfig(["ar"], tokens=2, repeats=3, prepare=lambda: begun.append(len(begun)))
    (found,) = speed.cell_rows(llm, texts, Cell(200, 1, 0.0, "books"), turns, saved, 0.0, float("inf"))
    assert begun == [0, 1, 2] and found["turns"] == 3


def row(cell: str, mode: str, tokens_per_second: float, upper: float = 1.0) -> dict[str, Any]:
    speedup = tokens_per_second / 100
    return {"cell": cell, "mode": mode, "tokens_per_second": tokens_per_second, "speedup": speedup, "upper": upper}


def test_cell_is_lost_below_upper_bound() -> None:
    rows = [row("a", "ar", 100), row("a", "auto", 96, 0.971), row("a", "triforce", 120)]
    rows += [row("b", "ar", 100), row("b", "auto", 110, 0.969), row("b", "triforce", 80)]
    found = verdict(rows)
    assert found["lost"] == ["b"] and found["cells"] == 2
    assert found["mean"] == pytest.approx(1.03) and found["of_best"] == pytest.approx((96 / 120 + 110 / 100) / 2)
    assert verdict([row("a", "ar", 100)]) == {"cells": 1, "lost": None, "mean": None, "of_best": None}


def test_upper_bound_is_student_t() -> None:
    ratios = [0.9, 1.0, 1.1, 1.05]
    logs = np.log(ratios)
    wanted = np.exp(logs.mean() + scipy.stats.t.ppf(0.95, 3) * logs.std(ddof=1) / 2)
    assert speed.speedup_bound(ratios) == pytest.approx(wanted, rel=2e-3)
    assert speed.speedup_bound([0.8]) is None and speed.speedup_bound([0.9, 0.9, 0.9]) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("repeats", "each", "ends", "turns"),
    [
        (None, 10.0, 1000.0, 7),
        (None, 0.5, 1000.0, 61),  # short ones, until 30 seconds are over
        (None, 0.5, 10.0, 21),
        (None, 10.0, 25.0, 3),
        (None, 10.0, 0.0, 3),
        (5, 0.5, 1000.0, 5),
        (5, 0.5, 0.0, 3),
        (1, 0.5, 0.0, 1),
    ],
)
def test_short_turns_are_repeated(
    repeats: int | None, each: float, ends: float, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(speed, "perf_counter", lambda: now[0])
    made = 0
    for turn in speed._turns(repeats, ends):
        assert turn == made
        made += 1
        now[0] += each
    assert made == turns


def test_speedup_is_median_of_paired_ratios() -> None:
    row = speed.timing([1.0, 2.0, 4.0], [2.0, 4.0, 4.0], tokens=8)
    assert row["seconds"] == 2.0 and row["tokens_per_second"] == 4.0
    assert row["speedup"] == 2.0 and row["spread"] == 1.0


def test_roofline_is_memory_or_arithmetic() -> None:
    roof = Roofline(100.0, {"int16": 50.0, "bfloat16": 20.0})
    assert roof.least_seconds(Work(1000)) == 10
    assert roof.least_seconds(Work(1000, {"int16": 400, "bfloat16": 20})) == 10
    assert roof.least_seconds(Work(1000, {"int16": 400, "bfloat16": 80})) == 12
    assert roof.least_seconds(Work(0, {"int4": 400})) == 0


def test_balance_is_of_a_mix_of_measured_operations() -> None:
    roof = Roofline(10.0, {"int16": 50.0, "int8": 200.0})
    assert roof.balance({"int16": 3}) == pytest.approx(5.0)
    assert roof.balance({"int16": 1, "int8": 1}) == pytest.approx(8.0)
    assert roof.balance({"int16": 1, "float32": 1}) is None


@pytest.mark.slow
def test_kernel_rows_compare_with_current_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SECONDS", 0.001)
    rows = list(kernels.rows([512], ["30m"]))
    steps = [row for row in rows if row["kernel"] == "step"]
    assert [row["width"] for row in steps] == [1, 2, 4, 8, 16]
    numbers, kv = 8 * (4 * 512 * 512 + 3 * 512 * 1408) + 8192 * 512, 512 * 16 * 1024
    assert {row["bytes"] for row in steps} == {2 * numbers + kv}
    for row in steps:
        assert row["operations"] == {"bfloat16": row["width"] * (2 * numbers + 4 * 512 * 8 * 512)}
    peaks = {row["kernel"]: row for row in rows if "fraction" not in row}
    bandwidth = peaks["read"]["gb_per_second"]
    for row in rows:
        if "fraction" in row:
            seconds = row["bytes"] / bandwidth / 1e9
            if dispatch.native:
                by_type = row["operations"].items()
                rates = {name: peaks[f"peak, {name}"]["gflop_per_second"] * 1e9 for name, _ in by_type}
                seconds = max(seconds, sum(count / rates[name] for name, count in by_type))
            if "shape" in row:  # others were measured beside other readings
                assert row["fraction"] == pytest.approx(seconds / row["seconds"])
    assert {row["kernel"] for row in rows} >= {
        "retrieval step",
        *(["retrieval step, int8"] if dispatch.native else []),
        "prefill attention",
        "prefill attention, torch",
        "sampler",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed", "--modes", "ar,magic"], "magic"),
        (["speed", "--workloads", "songs"], "songs"),
        (["speed", "--cells", "3k-b1-t0-books"], "3k-b1-t0-books"),
        (["speed", "--full", "--contexts", "512"], "exclude one another"),
        (["speed", "--batches", "0"], "at least 1"),
        (["speed", "--contexts", "100000000"], "smaller --contexts"),
        (["speed", "--texts", "nowhere.txt"], "nowhere.txt"),
        (["speed", "--json", "no/such/folder/x.json"], "folder that exists"),
        (["speed", "--contexts=-5"], "at least 2 tokens"),
        (["speed", "--repeats", "0"], "at least 1"),
        (["speed", "--synthetic", "0.9"], "OUTER,INNER"),
        (["speed", "--synthetic", "2,0.5"], "OUTER,INNER"),
        (["speed", "--synthetic", "0.9,0.5", "--retrieval-budget", "3%"], "in tokens"),
        (["speed", "--synthetic", "0.9,0.5", "--modes", "ar"], "--modes is for a model"),
        (["speed", "--shapes", "30m"], "--synthetic"),
        (["speed", "--layers", "2"], "--synthetic"),
        (["speed", "--synthetic", "0.9,0.5", "--layers", "0"], "at least 1"),
        (["compare", "--threads", "-1"], "--threads"),
        (["compare", "--timeout", "inf"], "--timeout"),
        (["kernels", "--shapes", "70b"], "70b"),
    ],
)
def test_speed_mistakes_exit_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_one_turn_is_shown_without_a_spread() -> None:
    row = {"speedup": 0.87, "spread": 0.0, "turns": 1}
    assert speedup(row) == "0.87" and speedup(row | {"turns": 2}) == "0.87 ± 0.00"

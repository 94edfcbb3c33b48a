"""`triforce bench compare`: engines that are there, that are not, and rows that do not count."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import on_folder, processes
from benchmarks.compare.engines import ENGINES
from benchmarks.compare.on_folder import summary
from benchmarks.compare.processes import speeds
from benchmarks.compare.workers.clock import Clock, common_tokens
from tests.helpers.extras import needs_torch

ROOT = Path(__file__).parents[2]
FEW = ["--contexts", "200", "--tokens", "8", "--threads", "1"]


@pytest.mark.slow
def test_compare_runs_triforce_and_transformers_on_same_ids(
    bench: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compare.json"
    fewer = {
        name: ENGINES[name]._replace(
            variants=tuple(spec for spec in ENGINES[name].variants if spec.name == variant), assisted=()
        )
        for name, variant in {"triforce": "ar", "transformers": "f32"}.items()
    }
    monkeypatch.setattr(on_folder, "ENGINES", ENGINES | fewer)
    monkeypatch.setattr(processes, "BUSY", 0)  # however busy the machine is
    monkeypatch.setattr(on_folder, "LONG", math.inf)  # and however long tries take on it
    assert bench("compare", *FEW, "--engines", "triforce,transformers", "--json", str(file)) == 0
    ours, theirs = json.loads(file.read_text())["rows"]
    for row in (ours, theirs):
        assert row["tokens"] == 7 and row["tokens_per_second"] == pytest.approx(7 / row["seconds"])
        assert row["prefill_seconds"] > 0 and row["version"]
        assert row["accepted"] and row["tries"] == 3 and 0 <= row["repeated_8_grams"] <= 1
    assert (ours["engine"], theirs["engine"]) == ("triforce", "transformers")
    assert ours["as_plain"] == 1 and 0 <= theirs["as_plain"] <= 1
    assert "of plain" in capsys.readouterr().out


@needs_torch
def test_compare_missing_engine_row_names_extra(
    bench: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interpreter without anything, as -S would have it, stands for a machine without the engine."""
    bare = tmp_path / "python"
    file = tmp_path / "compare.json"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    asked = [*FEW, "--engines", "onnx,openvino", "--python", f"all={bare}", "--json", str(file)]
    assert bench("compare", *asked) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["engine"] for row in rows] == ["onnx", "openvino"]
    assert "triforce[compare-onnx]" in rows[0]["missing"] and "triforce[compare-openvino]" in rows[1]["missing"]
    assert "Not compared" in capsys.readouterr().out


def test_compare_extras_exist_in_pyproject() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    assert {engine.needs for engine in ENGINES.values() if engine.needs} <= extras


@pytest.mark.parametrize(("busy", "accepted"), [(1.69, False), (1.71, True)])
def test_compare_rows_with_idle_cores_are_rejected(busy: float, accepted: bool) -> None:
    result = {"decoded": 10, "seconds": 2.0, "prefill_seconds": 1.0, "busy_cores": busy, "version": "1", "ids": []}
    row = speeds(result, 100, threads=2)
    assert row["accepted"] == accepted and row["tokens_per_second"] == 5 and row["prefill_tokens_per_second"] == 100


@pytest.mark.parametrize(
    ("busy", "long", "tries", "counts"),
    [
        ([0.9, 0.95, 1.0], 60.0, 3, 0.95),
        ([0.3, 0.9, 1.0], 60.0, 3, 1.0),
        ([0.3, 0.6, 0.5], 60.0, 3, 0.6),
        ([0.3, 0.9, 1.0], -1.0, 2, 0.9),
    ],
)
def test_compare_median_of_busy_rows_counts(
    busy: list[float], long: float, tries: int, counts: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The median is of three tries, or the first one that counts if it takes long; else the busiest try."""
    cores = iter(busy)
    tried = (
        {"busy_cores": cores_used, "accepted": cores_used >= processes.BUSY, "tokens_per_second": cores_used}
        for cores_used in cores
    )
    monkeypatch.setattr(on_folder, "_run", lambda *_: next(tried))
    monkeypatch.setattr(on_folder, "LONG", long)
    plan = on_folder.CompareConfig(tmp_path, None, ["triforce"], 8, 1, 60.0, {}, tmp_path)
    launcher = processes.Launcher({}, 1, 60.0, tmp_path, "")
    row = on_folder._row("triforce", ENGINES["triforce"].variants[0], [1], plan, launcher)
    assert (row["busy_cores"], row["tries"]) == (counts, tries)


def test_compare_summary_takes_best_setting() -> None:
    def row(engine: str, variant: str, speed: float, prefill: float, accepted: bool = True) -> dict[str, Any]:
        speeds = {"tokens_per_second": speed, "prefill_tokens_per_second": prefill}
        return {"engine": engine, "variant": variant, "context": 9, "accepted": accepted, **speeds}

    rows = [row("triforce", "ar", 60, 900), row("triforce", "auto", 120, 800), row("onnx", "fp32", 500, 1, False)]
    rows += [row("triforce", "ar, int8 KV", 100, 2000), row("triforce", "auto, int8 KV", 999, 700)]
    rows += [row("openvino", "u8", 30, 1000), row("openvino", "default", 40, 500), {"engine": "vllm", "context": 9}]
    (best,) = summary(rows)
    assert best["best"] == {"triforce": 120, "openvino": 40}
    assert (best["decode"], best["plain"], best["plain_int8_kv"], best["prefill"]) == (3.0, 1.5, 2.5, 0.9)
    assert summary(rows[:2])[0]["decode"] is None


def test_compare_worker_warms_up_before_first_turn_that_works() -> None:
    """The warm-up is a short text from the end of the prompt; it has no answer."""
    program = """
import sys, types

def load(task, seen=[]):
    def generate(turn):
        seen.append([len(turn["ids"]), turn["ids"][-1], turn["tokens"]])
        return {"seen": list(seen)} if turn["ids"][-1] else 1 / 0
    return generate

sys.modules["benchmarks.compare.workers.made_up_worker"] = worker = types.ModuleType("made_up_worker")
worker.load = load
from benchmarks.compare.workers.turns import main
main("made_up")
"""
    turns = [{"ids": [1] * 600 + [last_token], "tokens": 3} for last_token in (0, 5, 6)]
    lines = "".join(f"{json.dumps(line)}\n" for line in ({}, *turns))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=lines, cwd=ROOT, capture_output=True, text=True, check=True)
    failed, *answers = map(json.loads, done.stdout.splitlines())
    assert "ZeroDivisionError" in failed["failed"]
    assert answers[1]["seen"] == [[512, 0, 8], [512, 5, 8], [601, 5, 3], [601, 6, 3]]


@pytest.mark.parametrize("python", ["own", "other"])
def test_compare_worker_is_found_wherever_command_starts(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing worker is searched in its own `benchmarks`, not in that of the current folder."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    with processes.packages() as path:
        launcher = processes.Launcher({"made_up": str(bare)} if python == "other" else {}, 1, 60.0, tmp_path, path)
        with launcher.running("made_up", None, {}) as worker, pytest.raises(processes.EngineTrouble) as trouble:
            worker.ask(processes.turn_of([1], 1, {}))
    assert "'benchmarks.compare.workers.made_up_worker'" in trouble.value.row["failed"]


def test_compare_clock_separates_prefill() -> None:
    clock = Clock()
    clock.began = 0.0
    clock.cpu_began = 0.5
    clock.ticks = [(3.0, 5.0, 2), (4.0, 6.0, 4), (5.0, 8.5, 9)]
    times = clock.result([1] * 9, "1")
    assert (times["prefill_busy_cores"], times["version"]) == (1.5, "1")
    assert (times["prefill_seconds"], times["seconds"], times["decoded"], times["busy_cores"]) == (3.0, 2.0, 7, 1.75)


@pytest.mark.parametrize(
    ("read", "ids", "fresh_prompt", "kept_count"),
    [
        ([], [1, 2], False, 0),
        ([1, 2, 3], [1, 2, 4, 5], False, 2),
        ([1, 2, 3], [1, 2, 3], False, 2),
        ([1, 2, 3], [1, 2, 3], True, 0),
    ],
)
def test_kept_tokens_end_before_last_one(read: list[int], ids: list[int], fresh_prompt: bool, kept_count: int) -> None:
    assert common_tokens(read, {"ids": ids, "fresh": fresh_prompt}) == kept_count


@needs_torch
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engines", "magic"], "magic"),
        (["--python", "openvino"], "ENGINE=PATH"),
        (["--python", "magic=/usr/bin/python3"], "magic"),
        (["--tokens", "1"], "at least 2"),
    ],
)
def test_compare_mistakes_exit_2(
    bench: Callable[..., int], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("compare", *options) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@needs_torch
def test_compare_missing_interpreter_is_reported(bench: Callable[..., int], tmp_path: Path) -> None:
    file = tmp_path / "compare.json"
    options = ["--engines", "llamacpp", "--python", "llamacpp=/no/such/python", "--json", str(file)]
    assert bench("compare", *FEW, *options) == 0
    assert "/no/such/python" in json.loads(file.read_text())["rows"][0]["failed"]


@needs_torch
def test_gguf_export_permutes_rotary_heads(pair: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    import numpy as np
    from safetensors.numpy import load_file

    from benchmarks.compare.gguf_file import converted

    file = converted(str(pair / "target"), str(tmp_path))
    assert converted(str(pair / "target"), str(tmp_path)) == file
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    theirs = load_file(pair / "target" / "model.safetensors")
    for name, (heads, size) in {"q": (4, 16), "k": (2, 16)}.items():
        mine = np.array(tensors[f"blk.1.attn_{name}.weight"].data, dtype=np.float32).reshape(heads, size, -1)
        expected_weight = theirs[f"model.layers.1.self_attn.{name}_proj.weight"].reshape(heads, size, -1)
        for n in range(size // 2):  # feature n of the first half and of the second are neighbours now
            assert np.allclose(mine[:, 2 * n], expected_weight[:, n], atol=2e-3)
            assert np.allclose(mine[:, 2 * n + 1], expected_weight[:, n + size // 2], atol=2e-3)

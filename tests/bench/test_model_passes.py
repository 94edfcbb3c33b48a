"""`triforce bench kernels MODEL` on a tiny file, beside engines that are made up or not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_engine import interpreter
from tests.helpers.gguf_models import MIXED, Written, write_model
from triforce.backends import dispatch
from triforce.bench import kernels
from triforce.bench.model_passes import PassPlan, parts
from triforce.cli import main
from triforce.cli.bench.pass_table import tables

if dispatch.native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)

FEW = ["--contexts", "40,100", "--widths", "2,3", "--prompts", "64"]
Report = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_model(tmp_path_factory.mktemp("gguf"), "Q4_K", MIXED, num_hidden_layers=2)


@pytest.fixture
def measure(model: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """The command beside a llama.cpp that behaves so, and without ik_llama.cpp; what it wrote."""
    monkeypatch.setattr(kernels, "SECONDS", 1e-4)

    def run(behaviour: str, *options: str) -> Report:
        file = tmp_path / "rows.json"
        missing = interpreter(tmp_path, "missing")
        asked = ["bench", "kernels", str(model.gguf), *FEW, "--json", str(file), *options]
        pythons = {"all": missing, "llamacpp": interpreter(tmp_path, behaviour)}
        for engine, python in pythons.items():
            asked += ["--python", f"{engine}={python}"]
        assert main(asked) == 0
        return json.loads(file.read_text())

    return run


def rows(report: Report, engine: str, **fields: Any) -> list[Report]:
    engine_rows = [row for row in report["rows"] if row["engine"] == engine]
    return [row for row in engine_rows if all(row.get(name) == value for name, value in fields.items())]


def test_passes_stand_beside_bounds_parts_and_fastest_setting(
    measure: Callable[..., Report], capsys: pytest.CaptureFixture[str]
) -> None:
    report = measure("works")
    assert report["model"].endswith(".gguf") and "kernels" in report["machine"]
    cells = [(row["context"], row["width"]) for row in rows(report, "triforce", kernel="pass")]
    assert cells == [(context, width) for context in (40, 100) for width in (1, 2, 3)]
    assert [row["tokens"] for row in rows(report, "triforce", kernel="prompt")] == [64]
    theirs = rows(report, "llama.cpp", kernel="pass", context=100, width=2)
    assert {row["variant"]: row["seconds"] for row in theirs} == {
        "no flash attention, ubatch 512": 0.04,
        "flash attention, ubatch 512": 0.02,
    }
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "pip install 'triforce[compare-ikllamacpp]'" in out and "Passes after 100 tokens" in out
    start = next(n for n, line in enumerate(lines) if "Passes after 100 tokens" in line)
    heads = [line.split("  ")[0] or line.split("  ")[1] for line in lines[start + 1 : start + 12]]
    part_heads = ["products, Q6_K", "products, Q4_K", "attention", "rest"]
    own_heads = ["triforce", "over width 1", "bound", *part_heads]
    assert heads == ["tokens of a pass", *own_heads, "llama.cpp", "over width 1", "triforce's speed over it"]
    assert lines[start + 9].split() == ["llama.cpp", "10.00", "20.00", "30.00"]


def test_bounds_follow_from_rates_of_their_context(measure: Callable[..., Report]) -> None:
    report = measure("missing")
    for context in (40, 100):
        rates = {row["kernel"]: row for row in rows(report, "triforce", context=context)}
        peaks = {name: rates[f"peak, {name}"]["gflop_per_second"] * 1e9 for name in ("int16", "bfloat16")}
        for row in rows(report, "triforce", kernel="pass", context=context):
            of_bytes = row["bytes"] / rates["read"]["gb_per_second"] / 1e9
            of_operations = sum(count / peaks[name] for name, count in row["operations"].items())
            assert row["least_seconds"] == pytest.approx(max(of_bytes, of_operations))
            assert row["fraction"] == pytest.approx(row["least_seconds"] / row["seconds"])


def test_parts_add_up_to_their_pass_and_products_to_its_operations(measure: Callable[..., Report]) -> None:
    report = measure("missing")
    own_rows = rows(report, "triforce")
    for row in rows(report, "triforce", kernel="pass"):
        seconds = parts(own_rows, row["context"], row["width"])
        assert sum(seconds.values()) == pytest.approx(row["seconds"])
        assert set(seconds) == {"products, Q6_K", "products, Q4_K", "attention", "rest"}
        products = rows(report, "triforce", kernel="products", width=row["width"])
        assert sum(product["operations"]["int16"] for product in products) == row["operations"]["int16"]
        assert sum(product["bytes"] for product in products) < row["bytes"]


def test_engine_that_dies_ends_its_own_column(
    measure: Callable[..., Report], capsys: pytest.CaptureFixture[str]
) -> None:
    report = measure("dies")
    died = [row for row in rows(report, "llama.cpp") if "failed" in row]
    assert len(died) == 2 and all("signal 9" in row["failed"] for row in died)
    assert [row["width"] for row in rows(report, "llama.cpp", kernel="pass")] == [1, 1]
    assert len(rows(report, "triforce", kernel="pass")) == 6
    assert "Not measured" in capsys.readouterr().out


def test_build_without_instructions_is_noted_once(
    measure: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.compare.peer_passes.lacking", lambda built, level, package: f"{package} {built}")
    (note,) = [row for row in measure("works", "--engines", "llamacpp")["rows"] if "note" in row]
    assert note == {"engine": "llama.cpp", "note": "llama-cpp-python CPU : AVX2 = 1 | "}


def test_table_without_own_rows_has_no_ratios_to_them() -> None:
    plan = PassPlan([64], [100], [1, 2], 300)
    measured = [{"engine": "x", "kernel": "pass", "context": 100, "width": 1, "seconds": 0.5}]
    prompts, passes = tables(measured, plan)
    assert prompts.rows == [["x", "-"]]
    assert passes.rows == [["x", "500.00", "-"], ["  over width 1", "1.00", "-"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere.gguf"], "nowhere.gguf"),
        (["MODEL", "--widths", "0"], "--widths: give numbers of tokens from 1 to 64"),
        (["MODEL", "--widths", "65"], "--widths: give numbers of tokens from 1 to 64"),
        (["MODEL", "--widths", "two"], "two"),
        (["MODEL", "--contexts", "640"], "--contexts 640: give numbers of tokens from 2 to 624"),
        (["MODEL", "--prompts", "1"], "--prompts 1: give numbers of tokens from 2"),
        (["MODEL", "--shapes", "30m"], "--shapes 30m stands for a model"),
        (["MODEL", "--engines", "vllm"], "vllm"),
        (["MODEL", "--python", "vllm"], "ENGINE=PATH"),
        (["FOLDER", "--engines", "llamacpp"], "other engines are measured on GGUF files"),
        (["--widths", "2"], "--widths is for a model"),
        (["--python", "all=x"], "--python is for a model"),
        (["--shapes", "70b"], "70b"),
        (["--contexts", "1"], "at least 2 tokens"),
    ],
)
def test_pass_mistakes_exit_2(
    options: list[str], message: str, model: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"MODEL": str(model.gguf), "FOLDER": str(model.folder)}
    try:
        code = main(["bench", "kernels", *(paths.get(option, option) for option in options)])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_eagle_head_alone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.helpers.eagle_pair import eagle_pair

    assert main(["bench", "kernels", str(eagle_pair(tmp_path) / "draft")]) == 2
    assert "is an EAGLE head, whose passes are none of their own" in capsys.readouterr().err

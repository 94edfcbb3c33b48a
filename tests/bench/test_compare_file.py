"""`triforce bench compare` of a GGUF file, beside engines that are made up: none is installed for tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import command, on_file
from benchmarks.compare.on_file_tables import summary
from tests.helpers.fake_engine import interpreter
from tests.helpers.gguf_models import Written, write_model
from triforce.cli import main

FEW = ["--contexts", "128", "--tokens", "9", "--repeats", "2", "--threads", "1", "--timeout", "60"]
Report = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_model(tmp_path_factory.mktemp("gguf"), "Q4_1", num_hidden_layers=2)


@pytest.fixture
def compare(model: Written, texts: Path, tmp_path: Path) -> Callable[..., Report]:
    """`triforce bench compare FILE` with a llama.cpp that behaves so, and a triforce that is made up; what it wrote."""

    def run(behaviour: str, *options: str, real: bool = False) -> Report:
        file = tmp_path / "rows.json"
        pythons = {"llamacpp": behaviour} | ({} if real else {"triforce": "works"})
        asked = [str(model.gguf), "--texts", str(texts), *FEW, "--engines", "llamacpp"]
        for engine, engine_python in pythons.items():
            asked += ["--python", f"{engine}={interpreter(tmp_path, engine_python)}"]
        assert main(["bench", "compare", *asked, "--json", str(file), *options]) == 0
        return json.loads(file.read_text())

    return run


def rows(report: Report, what: str, **fields: Any) -> list[Report]:
    report_rows = [row for row in report["rows"] if row["what"] == what]
    return [row for row in report_rows if all(row.get(name) == value for name, value in fields.items())]


@pytest.mark.slow
def test_compare_file_takes_best_settings_of_engine(
    compare: Callable[..., Report], capsys: pytest.CaptureFixture[str]
) -> None:
    report = compare("works", real=True)
    assert {row["engine"] for row in rows(report, "setting")} == {"llamacpp"}
    chosen = {row["kind"]: row["variant"] for row in rows(report, "decoding", engine="llamacpp")}
    assert chosen == {"plain": "flash attention, ubatch 128", "lookup": "flash attention, ubatch 128, lookup 10"}
    plain = rows(report, "decoding", engine="llamacpp", kind="plain", workload="books", temperature=0)[0]
    assert plain["turns"] == [pytest.approx(100)] * 2 and plain["tokens_per_second"] == pytest.approx(100)
    (prefill,) = rows(report, "prefill", engine="llamacpp")
    assert prefill["turns"] == [pytest.approx(1000)] * 2
    ours = rows(report, "decoding", engine="triforce")
    assert {(row["kind"], row["workload"], row["temperature"]) for row in ours} == {
        (mode, text, temperature)
        for mode in ("ar", "auto")
        for text in ("books", "questions")
        for temperature in (0, 0.6)
    }
    assert all(row["as_plain"] == 1 for row in ours) and "kernels" in report["machine"]
    out = capsys.readouterr().out
    assert "Decoding after 128 tokens" in out and "auto over it" in out and "lookup 10" in out


def test_compare_file_ratios_are_of_turns(compare: Callable[..., Report]) -> None:
    report = compare("works", "--temperatures", "0", "--workload", "books", "--modes", "ngram")
    (ours,) = rows(report, "decoding", kind="ngram")
    cell = next(row for row in report["summary"] if row["what"] == "decoding")
    assert set(cell["over"]) == {"ar", "ngram"}
    assert cell["over"]["ngram"]["llamacpp plain"] == pytest.approx(sum(ours["turns"]) / 200)
    assert cell["over"]["ngram"]["llamacpp lookup"] == pytest.approx(sum(ours["turns"]) / 400)
    assert summary(report["rows"]) == report["summary"]


def test_compare_file_engine_that_dies_is_left_out(
    compare: Callable[..., Report], capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of its greedy texts exist, its other rows have the error, and triforce continues."""
    report = compare("dies")
    assert all(row["turns"] for row in rows(report, "decoding", engine="llamacpp", temperature=0, workload="books"))
    dead_rows = rows(report, "decoding", engine="llamacpp", temperature=0.6)
    assert len(dead_rows) == 4 and all("turns" not in row and "signal 9" in row["failed"] for row in dead_rows)
    assert all(len(row["turns"]) == 2 for row in rows(report, "decoding", engine="triforce"))
    assert "Not compared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("behaviour", "why"),
    [
        ("unreadable", "Failed to load model"),
        ("babbles", "no result"),
        pytest.param("sleeps", "no answer", marks=pytest.mark.slow),
    ],
)
def test_compare_file_useless_engine_says_why(
    compare: Callable[..., Report], behaviour: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    patience = "1" if behaviour == "sleeps" else "60"  # a busy machine is late, too
    report = compare(behaviour, "--temperatures", "0", "--workload", "books", "--timeout", patience)
    failed_rows = [row for row in rows(report, "setting", engine="llamacpp") if "failed" in row]
    assert failed_rows and all(why in row["failed"] for row in failed_rows)
    assert not rows(report, "decoding", engine="llamacpp")
    assert len(rows(report, "decoding", engine="triforce")) == 2
    assert why in capsys.readouterr().out


def test_compare_file_way_that_is_refused_leaves_others(compare: Callable[..., Report]) -> None:
    report = compare("refuses", "--temperatures", "0", "--workload", "books")
    failed = {row["variant"].split(", ")[-1] for row in rows(report, "setting") if "failed" in row}
    assert failed == {"lookup 2", "lookup 5", "lookup 10"}
    assert [row["kind"] for row in rows(report, "decoding", engine="llamacpp")] == ["plain"]


def test_compare_file_missing_engine_says_how_to_install(
    compare: Callable[..., Report], capsys: pytest.CaptureFixture[str]
) -> None:
    report = compare("missing", "--temperatures", "0", "--workload", "books")
    (absent,) = rows(report, "absent")
    assert "pip install 'triforce[compare-llamacpp]'" in absent["missing"]
    assert "triforce[compare-llamacpp]" in capsys.readouterr().out


def test_compare_file_build_without_instructions_is_noted(
    compare: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "kernels", lambda: "avx512bf16")
    (note,) = rows(compare("works", "--temperatures", "0", "--workload", "books"), "note")
    assert "AVX512_BF16" in note["note"] and "TRIFORCE_KERNELS=avx2" in note["note"]


def test_compare_file_goes_on_behind_last_whole_context(
    compare: Callable[..., Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows are taken over, and a file of other settings is left as it is."""
    measured = on_file.rows
    options = ["--contexts", "160,128", "--temperatures", "0", "--workload", "books"]

    def cut(*cut_args: Any) -> Iterator[Report]:
        for row in measured(*cut_args):
            if row["context"] == 128 and row["what"] == "decoding":
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(on_file, "rows", cut)
    with pytest.raises(AssertionError, match="assert 130 == 0"):
        compare("works", *options)
    first_report = json.loads((tmp_path / "rows.json").read_text())
    assert {row["context"] for row in first_report["rows"]} == {160} and "summary" not in first_report
    monkeypatch.setattr(on_file, "rows", measured)
    with pytest.raises(AssertionError, match="assert 2 == 0"):
        compare("works", *options, "--repeats", "1")
    assert "measured otherwise (repeats)" in capsys.readouterr().err
    report = compare("works", *options)
    assert "160 setting" not in capsys.readouterr().out
    assert report["rows"][: len(first_report["rows"])] == first_report["rows"]
    assert {row["context"] for row in rows(report, "decoding")} == {128, 160} and len(report["summary"]) == 4
    compare("works", *options)
    assert "160 setting" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--contexts", "640"], "at most"),
        (["--workload", "code"], "code"),
        (["--modes", "magic"], "magic"),
        (["--modes", "triforce"], "--draft"),
        (["--repeats", "0"], "--repeats"),
        (["--temperatures=-1"], "--temperatures"),
        (["--engines", "vllm"], "vllm"),
        (["--contexts", "16"], "question"),
    ],
)
def test_compare_file_mistakes_exit_2(
    model: Written, texts: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [str(model.gguf), "--texts", str(texts), *FEW, "--engines", "triforce", *options]
    assert main(["bench", "compare", *asked]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_compare_folder_refuses_options_of_files(bench: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--modes", "ar"], ["--temperatures", "0"], ["--repeats", "2"], ["--workload", "books,code"]):
        assert bench("compare", "--contexts", "200", *options) == 2
        assert "GGUF file" in capsys.readouterr().err

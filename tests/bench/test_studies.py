"""Studies take arguments as `triforce` does, measure on a tiny pair, and answer mistakes in one line."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import __main__ as overview
from benchmarks import offload
from benchmarks import study as studies
from benchmarks.acceptance.__main__ import add_arguments
from benchmarks.acceptance.sweeps import add_walk
from triforce.backends import dispatch
from triforce.cli.bench.setup import load
from triforce.errors import RequestError

SHORT = ["--context", "300", "--positions", "14", "--retrieval-budget", "64"]


def test_overview_lists_each_study_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert overview.main() == 0
    lines = capsys.readouterr().out.splitlines()
    names = {re.sub(r"python -m benchmarks\.(\w+) +\S.*[.:]$", r"\1", line) for line in lines}
    assert all(name.isidentifier() for name in names)
    assert {"acceptance", "locality", "quality", "paper", "gpu"} <= names and "study" not in names


def test_acceptance_measures_what_was_asked(
    study: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "acceptance.json"
    docs = tmp_path / "docs"
    swept = ["--budgets", "64", "--chunks", "16", "--full-layer-counts", "0", "--docs", str(docs)]
    # too short for the sixteen needles
    assert study("acceptance", *SHORT, *swept) == 2
    assert "too short to hide numbers in" in capsys.readouterr().err
    assert study("acceptance", *SHORT, "--context", "1900", *swept, "--json", str(file)) == 0
    report = json.loads(file.read_text())
    assert report["command"].startswith("python -m benchmarks.acceptance ") and report["context"] == 1900
    assert {row["budget"] for row in report["acceptance"]} == {64}
    assert (docs / "acceptance.md").exists() and "By chunk size" in capsys.readouterr().out


def test_unseen_texts_go_on_where_they_were_cut_off(
    study: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "unseen.json"
    short = ["--tokens", "6", "--repeats", "1", "--quiet"]
    arguments = [*short, "--contexts", "300,200", "--temperatures", "0,1", "--json", str(file)]
    assert study("unseen_texts", *arguments) == 0
    report = json.loads(file.read_text())
    cells = {row["cell"] for row in report["rows"]}
    assert cells == {
        f"{text}-b1-t{temperature}-{workload} {profile}"
        for text, workload in (("book.txt 300", "books"), ("project.py 200", "code"))
        for temperature in (0, 1)
        for profile in ("empty", "learnt")
    }
    file.write_text(json.dumps(report | {"rows": report["rows"][:-16]}))
    assert study("unseen_texts", *arguments) == 0
    again = json.loads(file.read_text())["rows"]
    assert again[:-16] == report["rows"][:-16] and len(again) == len(report["rows"])
    assert "below 0.97" in capsys.readouterr().out


@pytest.mark.skipif(dispatch.native is None, reason="a store is for the native kernels")
def test_offload_measures_each_kv_dtype_in_as_many_tokens(tmp_path: Path) -> None:
    file = tmp_path / "offload.json"
    short = ["--context", "2600", "--tokens", "4", "--skip-streaming"]
    assert offload.main([*short, "--memories", "8MiB", "--kv-dtypes", "auto,int8", "--json", str(file)]) == 0
    rows = [row for row in json.loads(file.read_text())["rows"] if row["what"] == "bus"]
    assert [(row["kv_dtype"], row["mode"]) for row in rows] == [
        (dtype, mode) for dtype in ("bfloat16", "int8") for mode in ("ar", "triforce")
    ]
    assert all(row["same_text_as_ar"] for row in rows)
    plain_share, coded = (row["kv_bytes"] / row["kv_memory"] for row in (rows[0], rows[-1]))
    assert plain_share == pytest.approx(coded, rel=1e-6) and plain_share > 1.8


@pytest.mark.parametrize(
    ("name", "arguments", "what"),
    [
        ("acceptance", ["--positions", "0"], "must be at least 1"),
        ("acceptance", ["--json", "nowhere/at/all.json"], "cannot be written"),
        ("locality", ["--context", "-3"], "must be at least 1"),
        ("quality", ["--questions", "99"], "--questions 99"),
    ],
)
def test_mistake_is_one_line_and_exit_code_2(
    study: Callable[..., int], name: str, arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study(name, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert what in line and line.startswith("triforce: error: ")


def test_unknown_option_is_refused_with_the_one_that_was_meant(
    study: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        study("locality", "--contxt", "3")
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "did you mean --context?" in line and "python -m benchmarks.locality" in line


def test_arguments_left_out_are_as_usual(pair: Path) -> None:
    llm = load(studies.parse("acceptance", None, add_arguments, [str(pair / "target"), "--draft", str(pair / "draft")]))
    assert llm.draft and llm.speculation.retrieval.budget.tokens == 2048 and llm.speculation.speculative_tokens == 6


@pytest.mark.parametrize("add", [add_arguments, add_walk])
def test_arguments_given_are_taken(add: Callable[..., None], pair: Path) -> None:
    asked = ["--draft", "none", "--retrieval-budget", "512", "--speculative-tokens", "3", "--dtype", "float32"]
    llm = load(studies.parse("acceptance", None, add, ["-m", str(pair / "target"), *asked]))
    assert (
        llm.draft is None and llm.speculation.retrieval.budget.tokens == 512 and llm.speculation.speculative_tokens == 3
    )


def test_errors_of_a_study_have_the_exit_codes_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(options: Namespace) -> None:
        raise RequestError("no such thing")

    assert studies.command("acceptance", __doc__, lambda parser: None, refuse)([]) == 2
    assert capsys.readouterr().err == "triforce: error: no such thing\n"

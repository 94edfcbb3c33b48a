"""`triforce eval`: plans, tables, files and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.recall_model import noise
from triforce.cli import main
from triforce.eval import MEASUREMENTS, eval_config
from triforce.eval.context import kind_of
from triforce.eval.time_budget import QUICK_LENGTHS
from triforce.llm import LLM
from triforce.tables import Table


@pytest.fixture
def texts(llm: LLM, tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for n, name in enumerate(("book.txt", "code_project.txt", "short.md")):
        ids = noise(30 if name == "short.md" else 3000, seed=n)
        (folder / name).write_text(llm.tokenizer.decode(ids), encoding="utf-8")
    (folder / ".hidden").write_bytes(b"\xff")
    (folder / "inner").mkdir()
    return folder


def evaluate(folders: tuple[str, str], texts: Path, *options: str) -> int:
    return main(["eval", folders[0], "--draft", folders[1], "--texts", str(texts), *options])


def test_eval_measures_shows_and_writes_all(
    folders: tuple[str, str], texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "eval.json"
    assert evaluate(folders, texts, "--quick", "--max-context", "512", "--json", str(out)) == 0
    (shown, stderr), report = capsys.readouterr(), json.loads(out.read_text())
    assert f"forecast: {report['forecast']['seconds']:.0f} s" in stderr and "readings of at most 512 tokens" in stderr
    assert "were predicted" in shown
    assert set(report["results"]) == set(MEASUREMENTS)
    skipped = {name for name, result in report["results"].items() if "skipped" in result}
    assert skipped == {"far", "inputs"}
    for name, result in report["results"].items():
        for table in MEASUREMENTS[name].tables(result) if name not in skipped else ():
            assert table.plain() in shown
    assert {text["name"]: text["kind"] for text in report["texts"]} == {
        "book.txt": "prose", "code_project.txt": "code", "short.md": "prose"
    }  # fmt: skip
    assert set(report["results"]["gain"]["control"]) == {"prose", "code"}


def test_eval_without_draft_runs_some(
    folders: tuple[str, str], texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(folders, texts, "--draft", "none", "--only", "agreement, bits", "--max-context", "256") == 0
    shown = capsys.readouterr().out
    assert "name one with --draft" in shown and "Bits per byte" in shown and "Copying" not in shown


def test_eval_of_int8_kv_is_shown_beside_kv_that_is_not_rounded(
    folders: tuple[str, str], texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "eval.json"
    sizes = ["--only", "bits,positions", "--max-context", "256"]
    assert evaluate(folders, texts, "--draft", "none", "--kv-dtype", "int8", *sizes, "--json", str(out)) == 0
    shown = capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["kv_dtype"] == "int8" and list(report["beside"]) == ["bits", "positions"]
    (line,) = [line for line in shown.splitlines() if line.startswith("int8 ")]
    assert f"{report['results']['bits']['kinds']['prose']['target']:.4f}" in line and "0.00%" in shown
    assert report["beside"]["bits"]["kinds"] != report["results"]["bits"]["kinds"] and "KV of " in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "bits,taste"], "'taste' is not known; choose from bits"),
        (["--texts", "no/such/file"], "cannot be read"),
        (["--texts", "{texts}/.hidden"], "not UTF-8"),
        (["--texts", "{texts}/inner"], "there is no text in"),
        (["--json", "{texts}/no/such/eval.json"], "cannot be written"),
        (["--json", "{texts}"], "cannot be written"),
        (["--max-context", "3"], "at least 128"),
        (["--device", "abacus"], "cannot be used here"),
    ],
)
def test_eval_mistakes_exit_2(
    folders: tuple[str, str], texts: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(folders, texts, *(option.format(texts=texts) for option in options)) == 2
    assert message in capsys.readouterr().err


def test_eval_empty_text_or_missing_tokenizer_is_reported(
    folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.helpers.tiny_checkpoint import save, tiny_model

    (tmp_path / "empty.txt").touch()
    assert evaluate(folders, tmp_path / "empty.txt") == 2
    assert "empty.txt" in capsys.readouterr().err
    bare = str(save(tiny_model(), tmp_path / "bare"))
    assert main(["eval", bare]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_eval_long_context_plan_is_documented_one() -> None:
    numbers = eval_config(131_072, 32_768)
    assert (numbers.far_positions.start, numbers.far_positions.stop, numbers.recent) == (16_384, 24_576, 2048)
    assert (numbers.prompts, numbers.new_tokens, numbers.compared_tokens) == (20, 512, 1024)
    assert eval_config(131_072, 131_072).longest_window == 131_072


@pytest.mark.parametrize("context", [128, 500, 2048, 4096, 40_960, 1_000_000])
@pytest.mark.parametrize("longest", [None, *QUICK_LENGTHS])
def test_eval_any_context_gives_plan(context: int, longest: int | None) -> None:
    numbers = eval_config(context, 131_072, longest)
    assert numbers.span <= numbers.longest_window <= min(context, 131_072)
    assert numbers.recent < numbers.far_positions.start < numbers.far_positions.stop < numbers.span
    assert len(numbers.far_positions) // numbers.stride > 1 and len(numbers.far_positions) >= 2 * numbers.block


def test_text_kind_follows_file_name() -> None:
    assert [kind_of(name) for name in ("code_a-b.txt", "x.py", "x.txt", "letter")] == ["code", "code", "prose", "prose"]


def test_table_is_aligned_on_terminal_and_markdown_in_file() -> None:
    table = Table("T", "note", ["text", "n"], [["a", "1"], ["long", "22"]])
    assert table.plain().splitlines() == ["== T ==", "text   n", "a      1", "long  22", "note"]
    assert "| long | 22 |" in table.markdown()

"""The paper pack and the page: every experiment on a tiny pair, and tables with the paper's figures beside ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page
from benchmarks.paper import acceptance, speed
from benchmarks.paper.__main__ import EXPERIMENTS, absent, main
from benchmarks.paper.experiment import Setup

ROOT = Path(__file__).parents[2]
QUICK = ["--quick", "--context", "1500", "--tokens", "4", "--positions", "14"]


@pytest.fixture(scope="module")
def measured(pair: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All experiments, measured one after another into one file."""
    file = tmp_path_factory.mktemp("paper") / "paper.json"
    models = ["--model", str(pair / "target"), "--draft", str(pair / "draft"), "--texts", str(texts)]
    fast = [name for name in EXPERIMENTS if name not in ("table4", "table7")]
    assert main([*fast[:2], *QUICK, *models, "--json", str(file)]) == 0
    assert main([*fast[2:], *QUICK, *models, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_paper_experiments_have_rows_and_table(measured: dict[str, Any]) -> None:
    assert set(measured) == set(EXPERIMENTS) - {"table4", "table7"}
    for name, report in measured.items():
        table = EXPERIMENTS[name].shown(report["rows"])
        assert report["rows"] and table.rows and report["command"].startswith("python -m benchmarks.paper")
        assert all(len(line) == len(table.header) for line in table.rows), name


@pytest.mark.parametrize(
    ("name", "figure"), [("table1", "0.9649"), ("table2", "2.31"), ("table5", "1.47"), ("table8", "2.31")]
)
def test_paper_figures_stand_beside_measured(measured: dict[str, Any], name: str, figure: str) -> None:
    assert figure in EXPERIMENTS[name].shown(measured[name]["rows"]).plain()


def test_paper_batches_and_lengths_match_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer cells are requested, but not measured here."""
    asked: list[tuple[Any, ...]] = []

    def note(self: Setup, cell: Any, modes: Any, tokens: int | None = None, **how: Any) -> list[Any]:
        budget = how["retrieval"].budget.tokens if how else None
        asked.append((cell.batch, cell.context, cell.temperature, tokens, budget))
        return []

    class Fake(Setup):
        def retrieval(self, **changes: Any) -> Any:
            from triforce.kvcache import RetrievalConfig

            return RetrievalConfig(**changes)

    monkeypatch.setattr(Setup, "speed", note)
    setup = Fake(None, None)  # type: ignore[arg-type]
    speed.table4(setup)
    assert {(b, c, budget) for b, c, _, _, budget in asked} == {
        (2, 57_344, 1024), (6, 19_456, 768), (10, 12_288, 768)
    }  # fmt: skip
    asked.clear()
    speed.table7(setup)
    assert [tokens for *_, tokens, budget in asked if budget is None] == [256, 512, 768, 1024, 1536, 2048]
    assert {(tokens, tokens // budget) for *_, tokens, budget in asked if budget} == {(2048, 8)}


def test_paper_budgets_are_paper_share_of_context() -> None:
    assert Setup(None, None, context=122_880).share(4096) == 4096  # type: ignore[arg-type]
    assert Setup(None, None, context=30_720).share(4096) == 1024  # type: ignore[arg-type]
    assert set(acceptance.TABLE1) >= {"oracle", "recent", "h2o", "mean_key"}


def test_paper_missing_results_are_reported() -> None:
    shown = absent().plain()
    assert all(name in shown for name in ("table3", "table6", "REST", "layer skipping"))


@pytest.mark.parametrize("name", ["table3", "table9"])
def test_paper_impossible_experiments_raise(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert f"{name} cannot be run" in capsys.readouterr().err


def test_paper_page_shows_measured_and_missing(measured: dict[str, Any], tmp_path: Path) -> None:
    results = tmp_path / "results"
    docs = tmp_path / "docs"
    results.mkdir()
    (results / "paper.json").write_text(json.dumps(measured))
    assert page.main(["--results", str(results), "--docs", str(docs), "--tables", str(docs / "benchmarks.md")]) == 0
    page_text = (docs / "benchmarks.md").read_text()
    assert "Table 2" in page_text and "Not measured yet: `triforce bench speed" in page_text
    assert "nan" not in page_text and "None" not in page_text


def test_speed_page_names_lost_cells(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = tmp_path / "results"
    docs = tmp_path / "docs"
    rows = []
    results.mkdir()
    for context, upper in ((512, 0.9), (1024, 1.2)):
        cell = {"cell": f"{context}-cell", "context": context, "batch": 1, "temperature": 0.0, "workload": "books"}
        for mode, speedup in (("ar", 1.0), ("auto", upper - 0.05)):
            timed = {"speedup": speedup, "spread": 0.1, "upper": upper, "tokens_per_second": 100 * speedup, "turns": 3}
            rows.append({**cell, "mode": mode, **timed, "prefill_tokens_per_second": 5000.0})
    report = {"machine": "this", "command": "triforce bench speed", "rows": rows}
    (results / "speed.json").write_text(json.dumps(report))
    assert page.main(["--results", str(results), "--docs", str(docs), "--tables", str(docs / "benchmarks.md")]) == 0
    page_text = (docs / "benchmarks.md").read_text()
    assert "below 0.97): 512-cell." in page_text and "1.00 times the tokens/s" in page_text
    assert (docs / "pictures" / "speed.svg").stat().st_size < 100_000


def test_page_of_published_rows_has_all_of_them() -> None:
    reports = {name: page.read(page.RESULTS / f"{name}.json") for name in page.SECTIONS}
    page_text = page.page(reports)
    assert all(reports.values()) and "Not measured yet" not in page_text
    assert all(f"## {title}\n" in page_text for title, *_ in page.SECTIONS.values())


def test_published_acceptance_page_equals_rows() -> None:
    report = page.read(page.RESULTS / "acceptance.json")
    assert report and page.acceptance_page(report) == (page.DOCS / "acceptance.md").read_text(encoding="utf-8")

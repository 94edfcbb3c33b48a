"""The benchmark of acceptance, on random models: its formulas, its walks, and the page it makes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.acceptance.measure import SELECTIONS, Case, acceptance, cases, drafting, laws, locality
from benchmarks.acceptance.report import default_case, markdown, mean
from benchmarks.acceptance.sweeps import SweepConfig
from benchmarks.acceptance.teacher_forcing import Walk
from benchmarks.acceptance.workloads import Size, Workload, copy, needle, plain
from tests.helpers.laws.tiny import LAYERS, MODELS, V
from triforce.bench.prompts import CUE, NAMES
from triforce.bench.results_file import dumps
from triforce.errors import RequestError
from triforce.interface.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]
PARAMS = SamplingParams(temperature=0.6, top_p=0.9)
SIZE = Size(context=300, positions=70, width=7)
USUAL = Case("observed", budget=64, chunk=16, full_layers=0)


def text(seed: int, length: int = 400) -> list[int]:
    return torch.randint(V, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def walk(seed: int = 0) -> Walk:
    return Walk(MODELS, plain("prose", f"text {seed}", text(seed), SIZE), PARAMS, chunk=8)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_acceptance_with_covering_budget_is_one(selection: str) -> None:
    row = acceptance(walk(), Case(selection, 384, 16, 0))
    assert row["rejection"] == pytest.approx(1, abs=1e-5) and row["seeded"] == pytest.approx(1, abs=1e-4)
    assert row["positions"] == SIZE.positions


def test_acceptance_with_all_layers_searched_is_one() -> None:
    assert acceptance(walk(), Case("recent", 32, 16, LAYERS))["rejection"] == pytest.approx(1)
    assert acceptance(walk(), Case("recent", 32, 16, 0))["rejection"] < 0.99  # a negative control


def test_walks_of_one_prefill_are_independent() -> None:
    """A setting has the same figures after any other setting, and in a walk of its own."""
    first_walk = walk()
    test_cases = cases([32], [8], [], USUAL)
    first_acceptances = [acceptance(first_walk, case) for case in test_cases]
    assert first_acceptances == [acceptance(first_walk, case) for case in reversed(test_cases)][::-1]
    assert first_acceptances[::5] == [acceptance(walk(), case) for case in test_cases[::5]]


def test_exact_laws_independent_of_view() -> None:
    first_walk = walk()
    exact = [laws(first_walk, USUAL._replace(selection=name))[1] for name in SELECTIONS]
    for a, b in pairwise(exact):
        assert torch.equal(a, b)


def test_oracle_is_best_and_recency_worst() -> None:
    """This holds on average; the difference depends on the model."""
    walks = [walk(seed) for seed in range(6)]
    rows = {name: [acceptance(w, USUAL._replace(selection=name)) for w in walks] for name in SELECTIONS}
    means = {name: mean(case_rows, "rejection") or 0 for name, case_rows in rows.items()}
    assert means["oracle"] > max(share for name, share in means.items() if name != "oracle")
    assert means["recent"] == min(means.values())


def test_draft_is_judged_by_full_and_retrieval_verifiers() -> None:
    full, retrieval = drafting(walk(), USUAL)
    assert (full["verifier"], retrieval["verifier"]) == ("full", "observed")
    assert 0.1 < full["seeded"] < full["rejection"] < 1
    assert full["rejection"] != retrieval["rejection"]


def test_locality_starts_at_one_and_decays() -> None:
    rows = locality(walk(), USUAL)
    assert [row["layer"] for row in rows] == list(range(LAYERS))
    for row in rows:
        assert row["tokens"] == list(range(0, SIZE.positions, SIZE.width))
        assert row["overlap"][0] == 1 > min(row["overlap"])
        assert row["recovered"][0] == row["recovered_once"][0]
        assert all(0 < share < 1 for share in row["recovered"] + row["recovered_once"])
    assert sum(sum(row["recovered"]) for row in rows) > sum(sum(row["recovered_once"]) for row in rows)


def encode(sentence: str) -> list[int]:
    return [ord(character) for character in sentence]


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_copy_workload_repeats_distant_text() -> None:
    work = copy("t", list(range(2000)), Size(1000, 70, 7))
    assert work.prompt == 1000 and len(work.ids) == 1070
    assert work.ids[1000 - CUE :] == list(range(250, 250 + CUE + 70))
    assert [span.stop - span.start for span in work.spans] == [7] * 10


def test_needle_workload_scores_digits_only() -> None:
    work = needle("t", encode("." * 4000), Size(3000, 70, 4), encode, decode)
    prompt_text = decode(work.ids[: work.prompt])
    asked = [span for span in work.spans if span.measured]
    assert work.prompt == 3000 and work.spans[-1].stop == len(work.ids)
    assert all(a.stop == b.start for a, b in pairwise(work.spans))
    assert decode([token for span in asked for token in work.ids[span.start : span.stop]]).isdigit()
    assert sum(span.stop - span.start for span in asked) == 5 * len(NAMES)
    for name in NAMES:
        assert prompt_text.count(name) == 1 and prompt_text.index(name) < 1500
        number = prompt_text[prompt_text.index(name) + len(name) + 4 :][:5]
        assert f"{name} is {number}" in decode(work.ids[work.prompt :])


def test_acceptance_short_text_or_context_raises() -> None:
    with pytest.raises(RequestError, match="too short to hide numbers in"):
        needle("t", encode("." * 4000), Size(1000, 70, 4), encode, decode)
    with pytest.raises(RequestError, match="40 tokens, 370 are needed"):
        plain("prose", "t", list(range(40)), SIZE)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """A small one, measured here."""
    works = [Workload(name, "a text", text(1, 370), plain(name, "", text(1), SIZE).spans) for name in ("prose", "copy")]
    walks = [Walk(MODELS, work, PARAMS, chunk=8) for work in works]
    report_head = {"machine": "this", "command": "python -m benchmarks.acceptance", "model": "random"}
    plan = SweepConfig(context=300, positions=70, retrieval_budget=64)
    return (
        report_head
        | plan.about()
        | {
            "acceptance": [acceptance(w, case) for w in walks for case in cases([32, 64], [8], [1], USUAL)],
            "draft": [row for w in walks for row in drafting(w, USUAL)],
            "locality": locality(walks[0], USUAL),
            "seconds": 1.0,
        }
    )


def test_acceptance_page_shows_rows(report: dict[str, Any]) -> None:
    assert json.loads(dumps(report)) == report
    page = markdown(report)
    row = acceptance(walk(1), USUAL)
    assert default_case(report) == USUAL
    assert page.count(f"{row['rejection']:.3f} / {row['seeded']:.3f}") >= 4  # for each sweep, and among the workloads
    assert "| selection | prose | copy |" in page and "| budget | 32 | 64 |" in page
    assert "None" not in page and "nan" not in page


def test_acceptance_pictures_stay_small(report: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.pictures import draw_acceptance

    draw_acceptance(report, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    assert all(1000 < file.stat().st_size < 100_000 for file in tmp_path.iterdir())


def test_published_acceptance_page_equals_rows() -> None:
    rows = ROOT / "benchmarks" / "results" / "acceptance.json"
    page = ROOT / "docs" / "results" / "acceptance.md"
    assert markdown(json.loads(rows.read_text(encoding="utf-8"))) == page.read_text(encoding="utf-8")

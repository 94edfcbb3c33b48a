"""Pages are short and plain: lengths of sentences and paragraphs, README's first screen, figures that are repeated."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean

import pytest

from tests.helpers import prose
from tests.helpers.pages import ROOT, pages
from triforce.bench.speed_tables import verdict
from triforce.server import errors

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_sentences_and_paragraphs_of_page_are_short(page: Path) -> None:
    counted = prose.count(page.read_text(encoding="utf-8"))
    assert (counted.sentences, counted.paragraphs) == ([], [])


def test_long_sentence_is_found_wherever_it_stands() -> None:
    long = " ".join(["word"] * 41)
    for text in (long, f"- one\n- {long}", f"| a | {long} |", f"Short one. [A {long}](x.md)"):
        assert len(prose.count(text).sentences) == 1
    for text in (f"```\n{long}\n```", f"<!-- {long} -->", f"    {long}", " ".join(["word"] * 40) + ". Next."):
        assert not prose.count(text).sentences
    assert len(prose.count("word. " * 121).paragraphs) == 1


def test_readme_fits_one_screen() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 100
    assert len(README.split()) <= 900
    screen = "\n".join(lines[:20])
    assert re.search(r"\d\.\d+ times", screen) and "    make demo" in screen


def test_readme_repeats_recorded_figures() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "speed.json").read_text(encoding="utf-8"))["rows"]
    auto = [row for row in rows if row["mode"] == "auto"]
    means = [mean(row["speedup"] for row in auto if row["context"] == context) for context in (32768, 131072)]
    said = re.search(r"\*\*(\d\.\d+) times\*\* .* at 32K\s+tokens, and (\d\.\d+) times at 128K", README)
    assert said and list(said.groups()) == [f"{each:.2f}" for each in means]
    losing = {row["mode"]: row["speedup"] for row in rows if row["cell"] == "512-b1-t1.2-copy"}
    shown = f"{losing['auto']:.2f} (mode `triforce` {losing['triforce']:.2f})"
    assert shown in README, "a losing row is among those shown"
    least = min(row["speedup"] for row in auto)
    assert f"make {least:.2f} of plain decoding" in README, "and the one that loses most is told of"


def test_pages_repeat_recorded_figures() -> None:
    def text(name: str) -> str:
        return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())

    results = ROOT / "benchmarks" / "results"
    names = "speed", "lossless", "lossless_int8"
    speed, lossless, int8 = (json.loads((results / f"{name}.json").read_text(encoding="utf-8")) for name in names)
    speedups = [row["speedup"] for row in speed["rows"] if row["mode"] == "auto"]
    assert f"In {len(speedups)} cells" in text("concepts/auto.md") and f"{mean(speedups):.2f} times the tokens" in text(
        "concepts/auto.md"
    )
    lost = verdict(speed["rows"])["lost"]
    assert all(f"`{cell}`" in text("concepts/auto.md") for cell in lost) and len(lost) <= 1
    assert f"costs up to {100 - 100 * min(speedups):.0f} %" in text("concepts/auto.md")
    certificate = (
        f"{lossless['texts']:,} texts of {lossless['tokens']:,} tokens in {lossless['comparisons']} comparisons"
    )
    assert certificate in text("concepts/exactness.md") and lossless["differing"] == int8["differing"] == 0
    assert [int8[count] for count in ("texts", "tokens")] == [lossless[count] for count in ("texts", "tokens")]
    short = [row["speedup"] for row in speed["rows"] if (row["context"], row["mode"]) == (512, "triforce")]
    assert f"has {min(short):.2f} to {max(short):.2f} of plain" in text("tutorial/settings.md")
    long = [row["speedup"] for row in speed["rows"] if row["context"] >= 8192 and row["mode"] != "ar"]
    assert min(long) > 1 and "From 8K tokens on, every measured mode" in text("tutorial/settings.md")


def test_error_codes_are_all_told() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    server = Path(errors.__file__).parent
    codes = {code for file in server.rglob("*.py") for code in re.findall(r'code="(\w+)"', file.read_text("utf-8"))}
    assert codes and {code for code in codes if f"`{code}`" not in page} == set()


def test_environment_variables_are_all_told() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    source = "\n".join(file.read_text("utf-8") for file in (ROOT / "src" / "triforce").rglob("*.py"))
    variables = set(re.findall(r'"(TRIFORCE_[A-Z_]+)"', source))
    assert variables and {name for name in variables if f"`{name}`" not in page} == set()

"""Pages are short and plain: lengths of sentences and paragraphs, README's first screen, figures that are repeated."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.helpers import prose
from tests.helpers.pages import ROOT, pages
from triforce.bench.speed import CONTROL, verdict
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


def recorded(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]
    return rows


def cell(name: str, context: int, workload: str) -> dict[str, Any]:
    """A cell of README's table in mode auto."""
    return next(
        row
        for row in recorded(name)
        if (row["mode"], row["temperature"], row["context"], row["workload"]) == ("auto", 1.0, context, workload)
    )


def test_readme_first_screen_names_machine_model_and_context_of_its_figures() -> None:
    said = " ".join("\n".join(README.splitlines()[:20]).split())
    real, toy = (f"{cell(name, *of)['speedup']:.2f}" for name, of in (
        ("smollm2_speed", (7168, "books")), ("pair_speed", (32768, "books"))))  # fmt: skip
    narrow = [f"{cell(name, *of)['speedup']:.2f}" for name, of in (
        ("smollm2_speed_avx2", (7168, "books")), ("pair_speed_avx2", (32768, "books")))]  # fmt: skip
    assert "two AVX512-BF16 cores `smollm2`, a real model of 135M parameters" in said
    assert f"**{real} times** the tokens per second after 7K tokens" in said and f"{toy} times after 32K" in said
    assert f"with AVX2 are {' and '.join(narrow)}" in said and "`triforce info MODEL`" in said


def test_readme_repeats_recorded_figures() -> None:
    """Its cells hardly repeat themselves, losing ones are among them, and those lost elsewhere are told of."""
    shown = [
        row
        for name in ("smollm2_speed", "smollm2_speed_avx2", "pair_speed", "pair_speed_avx2")
        for row in recorded(name)
        if row["mode"] == "auto" and row["temperature"] == 1.0
    ]
    assert max(row["repeated_8_grams"] for row in shown) < 0.015, "at most 1 %"
    assert min(row["speedup"] for row in shown) < 1
    auto = [row for row in recorded("speed") if row["mode"] == "auto"]
    own = [row["speedup"] for row in auto if row["repeated_8_grams"] <= 0.02]
    said = " ".join(README.split())
    whole, least = mean(row["speedup"] for row in auto), min(row["speedup"] for row in auto)
    assert f"makes {whole:.2f} in the mean, {least:.2f} in the worst, and {mean(own):.2f} in the {len(own)}" in said
    narrow = json.loads((ROOT / "benchmarks/results/draft_speed_avx2.json").read_text())["summary"]
    ratios = sorted((row["over"]["auto"]["triforce ar"] for row in narrow if row["what"] == "decoding"), reverse=True)
    assert "made {:.2f}, {:.2f}, {:.2f} and {:.2f} with `smollm2` and AVX2".format(*ratios) in said
    bus = next(r for r in recorded("offload_int8") if (r.get("mode"), r.get("kv_dtype")) == ("triforce", "bfloat16"))
    assert f"read at 2 GB/s, mode `triforce` makes {bus['speedup']:.2f} with the pair at 32K" in said
    assert f"waits {recorded('documents_cpu')[0]['ratio']:.0f} times as long for its first token as the second" in said


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
    assert certificate in text("concepts/exactness.md") and certificate in text("results/benchmarks.md")
    assert lossless["differing"] == int8["differing"] == 0
    assert [int8[count] for count in ("texts", "tokens")] == [lossless[count] for count in ("texts", "tokens")]
    short = [row["speedup"] for row in speed["rows"] if (row["context"], row["mode"]) == (512, "triforce")]
    assert f"has {min(short):.2f} to {max(short):.2f} of plain" in text("tutorial/settings.md")
    long = [row["speedup"] for row in speed["rows"] if row["context"] >= 8192 and row["mode"] != "ar"]
    assert min(long) > 1 and "From 8K tokens on, every measured mode" in text("tutorial/settings.md")


RESULTS = ROOT / "benchmarks" / "results"
SUMMARY = (ROOT / "docs" / "results" / "benchmarks.md").read_text(encoding="utf-8")


def test_results_fit_two_screens_and_name_all_files_of_rows() -> None:
    assert prose.count(SUMMARY).words <= 900
    assert len(re.findall(r"^\|---", SUMMARY, re.MULTILINE)) <= 4
    named = re.findall(r"`([\w*]+\.json)`", SUMMARY)
    assert [file.name for file in RESULTS.glob("*.json") if not any(fnmatch(file.name, name) for name in named)] == []


def test_results_repeat_recorded_figures() -> None:
    said = " ".join(SUMMARY.split())
    found, again = verdict(recorded("speed")), [r for r in recorded("unseen_texts") if r["mode"] == CONTROL]
    assert f"{found['cells']} cells of" in said and f"has {found['mean']:.2f} times the tokens/s" in said
    assert f"{found['of_best']:.2f} times those of the best fixed mode" in said
    for mode in ("retrieval", "triforce"):
        of = [r for r in recorded("speed") if r["mode"] == mode]
        means = {
            context: mean(r["speedup"] for r in of if r["context"] == context) for context in {r["context"] for r in of}
        }
        assert max(context for context, each in means.items() if each < 1) == 4096 and "lose up to 4K" in said
    assert f"makes {min(r['speedup'] for r in again):.2f} in the worst cell" in said
    first = [f"{r['kept'][0]:.2f}"[1:] for r in recorded("draft_acceptance")]
    assert f"{min(first)} to {max(first)} are accepted" in said
    for draft, verb in (("plain", "gives"), ("reads hidden states", "reads hidden states")):
        tokens = [r["tokens"] for r in recorded("plain_draft") if r["draft"] == draft]
        assert f"{verb} {min(tokens):.2f} to {max(tokens):.2f}" in said
    (six,) = (
        r
        for r in json.loads((RESULTS / "paper.json").read_text())["table2"]["rows"]
        if (r["mode"], r["temperature"]) == ("triforce", 0.6)
    )
    assert f"TriForce makes {six['speedup']:.2f} times" in said
    names = "synthetic", "synthetic_int8", "synthetic_int8_avx2"
    shapes = [r["speedup"] for name in names for r in recorded(name) if r["mode"] == "auto"]
    assert f"`auto` makes {min(shapes):.2f} to {max(shapes):.2f}" in said
    needles = {
        r["decoder"]: r["right"] * r["questions"]
        for r in recorded("quality")
        if (r["task"], r["context"]) == ("needle", 16384)
    }
    assert needles == {"plain decoding": 7, "auto": 7, "StreamingLLM": 1, "H2O": 1}


def test_results_repeat_costs_of_int8_kv() -> None:
    said = " ".join(SUMMARY.split())
    bits = {(r["model"], r["kv"]): r["bits"]["kinds"]["prose"]["target"] for r in recorded("kv_quality")}
    more = {(model, kv): 100 * (each / bits[model, "bfloat16"] - 1) for (model, kv), each in bits.items()}
    models = list(dict.fromkeys(model for model, _ in more))
    assert all(0 <= more[model, "int8"] < 0.01 for model in models) and "less than .01 % more" in said
    for kv, told in (("upper nibbles alone", "cost"), ("upper nibbles alone, heads not rotated", "rotated heads")):
        pair, real = (f"{more[model, kv]:.2f}"[1:] for model in models)
        assert f"{told} {pair} % and {real} %" in said
    far = {r["kv"]: r["far"]["kinds"]["prose"][-1] for r in recorded("kv_quality_128k")}
    assert (far["int8"]["from"], far["int8"]["to"]) == (64 << 10, 128 << 10)
    assert f"by {abs(far['int8']['nats'] - far['bfloat16']['nats']):.4f}".replace("0.", ".") + " nats" in said


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

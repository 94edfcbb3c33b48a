"""The certificate, and the study of what eviction costs: both can say no."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.acceptance.h2o import HeavyHitters
from benchmarks.quality import EVICTIONS, EvictingDecoder
from tests.helpers.mutants.registry import caught_in
from triforce.backends.torch.tensors import as_tensor
from triforce.bench import lossless
from triforce.bench.prompts import Sources, generate_batch, prompts, variant_of
from triforce.engine.sequence_batch import SequenceBatch
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

FEW = ["--contexts", "300", "--temperatures", "0,0.8", "--batches", "1,2", "--workloads", "copy", "--tokens", "10"]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
MODES = ["--modes", "triforce,ngram"]


def certify(bench: Callable[..., int], tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "certificate.json"
    code = bench("lossless", *FEW, *MODES, *more, "--json", str(file))
    return code, json.loads(file.read_text())


def test_lossless_certificate_holds(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = certify(bench, tmp_path)
    assert code == 0 and report["lossless"] and report["differing"] == 0 and report["where"] == []
    assert report["tokens"] == 10 * report["texts"] == sum(row["tokens"] for row in report["rows"])
    assert report["comparisons"] == len(report["rows"])
    kinds = {(row["mode"], row["coupling"], row["temperature"]) for row in report["rows"]}
    assert ("triforce", "seeded", 0.8) in kinds and ("ngram", "block", 0.0) in kinds
    assert not [kind for kind in kinds if kind[1] in ("rejection", "block") and kind[2] > 0]
    assert {row["batch"] for row in report["rows"] if row["with"] == "alone"} == {2}
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {name: value for name, value in report.items() if name != "rows"}


def test_certificate_mutant_is_found(
    bench: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (mutant,) = caught_in("test_certificate_mutant_is_found")
    mutant.apply(monkeypatch)
    code, report = certify(bench, tmp_path)
    assert code == 1 and not report["lossless"] and report["differing"] == 2
    assert {(row["mode"], row["first"], row["temperature"]) for row in report["where"]} == {("ngram", 9, 0.8)}
    assert "DIFFERS" in capsys.readouterr().out


def test_rows_are_verified_by_coupling_named(
    bench: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the certificate names is what the engine does."""
    init, used = SequenceBatch.__init__, list[tuple[str, int]]()

    def noted(self: SequenceBatch, models: Any, mode: Any, speculation: Any, coupling: str, *rest: Any) -> None:
        used.append((coupling, speculation.speculative_tokens))
        init(self, models, mode, speculation, coupling, *rest)

    monkeypatch.setattr(SequenceBatch, "__init__", noted)
    _, report = certify(bench, tmp_path, "--temperatures", "0")
    named = [row["coupling"] for row in report["rows"] if row["with"] == "plain decoding"]
    assert {coupling for coupling, _ in used} == {*named} == {"seeded", "rejection", "block"}
    assert all(sum(each == coupling for each, _ in used) >= named.count(coupling) for coupling in named)


def test_varied_engine_speculates_otherwise(llm: LLM, sources: Sources) -> None:
    prompt, other = prompts(sources, "copy", 200, 1), variant_of(llm, speculative_tokens=2, draft_tokens=1)
    outputs = [generate_batch(each, prompt, GREEDY, "triforce").outputs[0] for each in (llm, other)]
    assert outputs[0].token_ids == outputs[1].token_ids
    proposed = [output.tiers[-2].proposed / output.tiers[-1].passes for output in outputs]
    assert proposed[1] <= 2 + 1 < proposed[0]


def test_certificate_cut_off_goes_on(
    bench: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the cell that it was cut off in. One that is whole is begun anew, with other settings too."""
    compare, made = lossless._comparisons, []

    def counted(llm: LLM, texts: list[list[int]], temperature: float, *rest: Any) -> Iterator[dict[str, Any]]:
        made.append((llm.speculation.lower_tiers, temperature))
        if len(made) == 3:
            raise KeyboardInterrupt
        yield from compare(llm, texts, temperature, *rest)

    monkeypatch.setattr(lossless, "_comparisons", counted)
    file, tiers = tmp_path / "certificate.json", ["--lower-tiers", "same,int8", "--retrieval-budget", "64"]
    arguments = ["lossless", *FEW, "--modes", "ngram", "--couplings", "seeded", "--json", str(file)]
    assert bench(*arguments, *tiers) == 130
    partly = json.loads(file.read_text())
    assert "lossless" not in partly and {row["lower_tiers"] for row in partly["rows"]} == {"same"}
    assert bench(*arguments) == 2
    assert "was measured otherwise (lower_tiers, retrieval_budget)" in capsys.readouterr().err
    assert bench(*arguments, *tiers) == 0
    assert made == [("same", 0.0), ("same", 0.8), ("int8", 0.0), ("int8", 0.0), ("int8", 0.8)]
    whole = json.loads(file.read_text())
    assert whole["lossless"] and whole["rows"][: len(partly["rows"])] == partly["rows"]
    assert whole["comparisons"] == 2 * len(partly["rows"])
    assert bench(*arguments) == 0 and len(made) == 7


def test_certificate_of_nothing_is_not_lossless() -> None:
    assert not lossless.certificate([])["lossless"]


@pytest.mark.parametrize(("option", "value"), [("--couplings", "magic"), ("--workloads", "songs"), ("--tokens", "0")])
def test_lossless_mistakes_exit_2(
    bench: Callable[..., int], option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("lossless", option, value) == 2
    error = capsys.readouterr().err
    assert (value if option != "--tokens" else "--tokens") in error and "Traceback" not in error


def test_lossless_context_too_long_is_reported(bench: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("lossless", "--contexts", "9999999") == 2
    assert "beyond the model's" in capsys.readouterr().err


def test_quality_reports_cost_of_eviction(
    study: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "quality.json"
    few = ["--contexts", "700", "--budgets", "64", "--questions", "3", "--tokens", "12"]
    assert study("quality", *few, "--json", str(file)) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {row["task"] for row in rows} == {"needle", "copy"} and len(rows) == 2 * (2 + len(EVICTIONS))
    for row in rows:
        lossy = row["decoder"] in EVICTIONS
        assert 0 <= row["right"] <= 1 and (row["as_plain"] < 1) == lossy, row
        assert (row["identical"] < row["questions"]) == lossy
    assert "H2O" in capsys.readouterr().out


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_eviction_with_covering_budget_loses_nothing(llm: LLM, sources: Sources, eviction: str) -> None:
    asked = prompts(sources, "copy", 200, 2)
    forgetful = EvictingDecoder(llm.target.decoder, asked, 10)
    for prompt in asked:
        whole = forgetful.continued(prompt, eviction, 512)
        assert whole == generate_batch(llm, [prompt], GREEDY, "ar").outputs[0].token_ids
        assert whole != forgetful.continued(prompt, eviction, 32)  # a negative control


def test_h2o_keeps_heavy_hitters_and_never_restores(llm: LLM, sources: Sources) -> None:
    (prompt,) = prompts(sources, "books", 400, 1)
    full = EvictingDecoder(llm.target.decoder, [prompt], 1)
    policy = HeavyHitters(full.mass_LGU)
    first = policy.pick(full.full, 0, 16, range(1, 20), 6)
    mass_LGN = as_tensor(full.mass_LGU)[..., 1:20]
    assert first.tolist() == (mass_LGN.topk(6).indices.sort(-1).values + 1).tolist()
    second = policy.pick(full.full, 0, 16, range(1, 22), 8)
    kept = [[set(old) | {20, 21} for old in heads] for heads in first.tolist()]
    for layer, heads in enumerate(second.tolist()):
        for head, chunks in enumerate(heads):
            assert set(chunks) <= kept[layer][head], "what was gone came back"

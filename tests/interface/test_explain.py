"""Explanation of a generation: figures that add up, and advice that comes from what was measured."""

from __future__ import annotations

import json
import types
from dataclasses import asdict
from typing import Any

import pytest

from triforce.cli import main
from triforce.interface.explain import (
    Explanation,
    PlanReport,
    PlanSegment,
    TierBelief,
    TierStats,
    WeighedPlan,
    explain,
    total,
)
from triforce.interface.outputs import CompletionOutput, RequestOutput
from triforce.interface.sampling_params import SamplingParams

DRAFT = TierStats("draft", 200, 130, 100, 0.03)
RETRIEVAL = TierStats("retrieval", 180, 160, 60, 0.10, histogram=[2, 3, 25], visible_tokens=2100)
FULL = TierStats("full", 190, 190, 30, 0.15)
DEEP = "draft 2 > retrieval 6 > full"


def explained(mode: str = "triforce", prompt: int = 16_000, **changes: Any) -> Explanation:
    """Return the explanation of a fast generation, with `changes`."""
    tiers = changes.get("tiers", [DRAFT, RETRIEVAL, FULL])
    seconds = changes.get("seconds", (0.5, 0.3))
    return explain(mode, prompt, [changes.get("timeline", [])], tiers, [changes.get("tokens", 190)], seconds)


def stretches(plain: int, deep: int) -> list[PlanSegment]:
    why = dict(
        reason="promises most",
        score=720.0,
        rival="ngram 4 > full",
        rival_score=612.0,
        cause="the next weighing was due",
    )
    return [
        PlanSegment("full", plain, plain, 0.1, 300.0, 300.0),
        PlanSegment(DEEP, deep, 6 * deep, 0.2, 700.0, 300.0, **why),
    ]


def test_explain_good_run_gives_no_advice() -> None:
    assert explained().advice == []
    assert explained("auto", timeline=stretches(2, 28)).advice == []


POOR_DRAFT = TierStats("draft", 200, 50, 100, 0.03)
NARROW = TierStats("retrieval", 180, 100, 60, 0.10, histogram=[9, 9], visible_tokens=2100)
CERTAIN = TierStats("retrieval", 180, 175, 60, 0.10, histogram=[1, 0, 0, 0, 0, 0, 29], visible_tokens=2100)
COPIES = TierStats("ngram", 200, 180, 60, 0.01)
ADVICE = {
    "a short prompt": (dict(mode="auto", prompt=500, timeline=stretches(60, 2)), "your prompt is short: plain"),
    "draft tokens that do not pay": (dict(mode="auto", timeline=stretches(60, 2)), "plain decoding is best"),
    "a mode that loses": (dict(seconds=(0.5, 2.0)), "slower than plain decoding, which would give 200 tokens/s"),
    "a narrow budget": (dict(tiers=[DRAFT, NARROW, FULL]), "a larger budget would raise the acceptance"),
    "a low gamma": (dict(tiers=[DRAFT, CERTAIN, FULL]), "a larger speculative_tokens"),
    "a poor draft": (dict(tiers=[POOR_DRAFT, RETRIEVAL, FULL]), "25% of its tokens are accepted"),
    "a loop": (dict(tiers=[COPIES, RETRIEVAL, FULL]), "repeats itself: 180 tokens"),
    "a long prompt, a short answer": (dict(seconds=(30.0, 0.3)), "99% of the time went into reading"),
}


@pytest.mark.parametrize("bad", ["a narrow budget", "a low gamma", "a poor draft"])
@pytest.mark.parametrize("plain", ["a short prompt", "draft tokens that do not pay", "a mode that loses"])
def test_explain_losing_speculation_advises_plain_decoding_only(plain: str, bad: str) -> None:
    changes, words = ADVICE[plain]
    (advice,) = explained(**(ADVICE[bad][0] | changes)).advice
    assert words in advice


def chose(*budgets: int) -> list[str]:
    timeline = [PlanSegment(DEEP, 10, 60, 0.1, 700.0, 300.0, budget) for budget in budgets]
    return explained("auto", tiers=[DRAFT, NARROW, FULL], timeline=timeline).advice


def test_explain_weighed_budget_is_not_advised() -> None:
    assert chose(2048) == chose(2048, 1024) == chose(2048, 4096, 2048) == []
    (line,) = chose(2048, 4096)
    assert "retrieval_budget 8192" in line and "4,096 is the most" in line


@pytest.mark.parametrize(("changes", "words"), ADVICE.values(), ids=ADVICE)
def test_explain_advice_follows_measurements(changes: dict[str, Any], words: str) -> None:
    (line,) = explained(**changes).advice
    assert words in line


@pytest.mark.parametrize(("changes", "words"), ADVICE.values(), ids=ADVICE)
def test_explain_few_tokens_give_no_advice(changes: dict[str, Any], words: str) -> None:
    stats = [
        TierStats(t.name, t.proposed // 20, t.accepted // 20, t.passes // 20, t.seconds / 20) for t in (DRAFT, FULL)
    ]
    little = changes | dict(tiers=stats, seconds=(0.1, 0.01), timeline=changes.get("timeline", []) and stretches(3, 0))
    assert explained(**little, tokens=9).advice == []


def test_explain_fixed_plan_needs_reason_to_be_slow() -> None:
    """A pass of the full tier takes 5 ms: plain decoding would give 200 tokens/s, and 190 is about that."""
    assert explained(seconds=(0.5, 1.0)).advice == [] and explained(seconds=(0.5, 1.0)).plain == pytest.approx(200)


def test_explain_figures_add_up() -> None:
    ours = explained("auto", timeline=stretches(10, 30))
    assert ours.tokens_per_second == pytest.approx(190 / 0.3)
    assert ours.predicted == pytest.approx((0.1 * 300 + 0.2 * 700) / 0.3) and ours.plain == pytest.approx(300)
    assert [part.milliseconds for part in ours.tiers] == pytest.approx([0.3, 100 / 60, 5.0])
    assert json.loads(json.dumps(asdict(ours)))["timeline"][1]["plan"] == DEEP
    assert explained("ar", tiers=[FULL]).plain == explained("ar", tiers=[FULL]).tokens_per_second
    assert explained(timeline=[]).predicted is None


def test_explain_tiers_of_several_texts_are_summed() -> None:
    (tier_total,) = total([[RETRIEVAL], [CERTAIN]])
    assert (tier_total.proposed, tier_total.accepted, tier_total.visible_tokens) == (360, 335, 2100)
    assert tier_total.histogram == [3, 3, 25, 0, 0, 0, 29]


def output(mode: str = "auto", repeats: int = 1, report: PlanReport | None = None, deep: int = 20) -> RequestOutput:
    timeline = stretches(10, deep) * repeats if mode == "auto" else []
    tiers = [DRAFT, RETRIEVAL, FULL]
    completion = CompletionOutput(0, "x", [1] * 190, "length", None, ["full"] * 190, 7, tiers, timeline, report)
    return RequestOutput([1] * 16_000, None, [completion], mode, "seeded", "bitwise", 0.5, 0.3)


class FakeLLM:
    """Gives one answer, whatever is asked."""

    answer = output()

    def __init__(self, model: str | None, **settings: Any) -> None: ...

    def sampling_params(self, **fields: Any) -> SamplingParams:
        return SamplingParams(**fields)

    def encode(self, prompt: str) -> list[int]:
        return [1] * len(prompt)

    def generate(self, prompt: list[int], params: object, **settings: Any) -> list[RequestOutput]:
        return [self.answer]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    monkeypatch.setitem(__import__("sys").modules, "triforce.llm", types.SimpleNamespace(LLM=FakeLLM))
    monkeypatch.setattr(FakeLLM, "answer", output())
    return FakeLLM


def test_explain_command_prints_tables(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "a prompt"]) == 0
    out = capsys.readouterr().out
    assert (
        "== Tiers ==" in out and "== Plans ==" in out and DEEP in out and "633.3 tokens/s; the plans predicted" in out
    )
    assert "- advice needs 40 proposals, and this text has 30: raise -n." in out
    (row,) = (" ".join(line.split()) for line in out.splitlines() if "promises most" in line)
    assert row.endswith("600 700 720 612 ngram 4 > full promises most; weighed because the next weighing was due")


def test_explain_shows_what_was_weighed(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    weighed = [
        WeighedPlan("full", 100.0, 100.0),
        WeighedPlan("draft 2 > full", 90.0, 0.0),
        WeighedPlan(DEEP, 150.0, 180.0),
    ]
    belief = TierBelief("draft", (0.25, 1.5), 20.0, 0.7, 0.05, 64.0)
    fake.answer = output(report=PlanReport([belief], weighed, 0.5, 0.02))
    assert main(["explain", "a prompt"]) == 0
    _, section = capsys.readouterr().out.split("== Weighed ==")
    weighed_line = " ".join(section.split())
    assert f"{DEEP} would make 150.0 tokens/s, plain decoding 100.0" in weighed_line
    assert "may risk 0.020 s" in weighed_line
    rows = [line for line in section.splitlines() if line.startswith((DEEP, "full", "draft 2"))]
    assert [row.split("  ")[0] for row in rows] == [DEEP, "full", "draft 2 > full"]
    assert rows[2].endswith("risks more than the headroom") and "0.70 ± 0.05" in section


def test_explain_names_loss_and_missing_advice(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    plain_plan = WeighedPlan("full", 100.0, 100.0)
    fake.answer = output(report=PlanReport([], [plain_plan], -0.014, 0.0), deep=30)
    assert main(["explain", "a prompt"]) == 0
    out = capsys.readouterr().out
    assert "Speculation cost 0.01 s so far" in out
    assert "- these measurements suggest no faster setting" in out


def test_explain_long_timeline_is_cut_in_middle(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    fake.answer = output(repeats=30)
    main(["explain", "a prompt"])
    out = capsys.readouterr().out
    assert "(36 more)" in out and out.count(DEEP) == 12


def test_explain_fixed_mode_has_no_timeline(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    fake.answer = output("triforce")
    assert main(["explain", "a prompt", "--mode", "triforce"]) == 0
    assert "== Plans ==" not in capsys.readouterr().out


def test_explain_json_holds_all_figures(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "a prompt", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mode"] == "auto" and report["tiers"][1]["visible_tokens"] == 2100 and len(report["timeline"]) == 2


def test_explain_mistakes_equal_those_of_generate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "model", ""]) == 2 and "empty" in capsys.readouterr().err
    assert main(["explain", "a prompt", "--temperature", "-1"]) == 2 and "temperature" in capsys.readouterr().err

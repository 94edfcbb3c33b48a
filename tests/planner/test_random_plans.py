"""Whatever a pilot decides, the text of a seed is that of plain decoding: on the native kernels, bit for bit."""

from __future__ import annotations

import random
from importlib import resources

import pytest

from tests.helpers.simulated_tiers import plans
from tests.planner.test_controller import with_whims
from triforce import LLM, SamplingParams
from triforce.backends import native_loader
from triforce.interface.outputs import RequestOutput
from triforce.planner import CostModel, Plan, PlanController, cadence, controller
from triforce.planner.forecast import TIMES
from triforce.planner.plan import families
from triforce.session import Session

if native_loader.native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)

LENGTHS = 700, 350, 90  # tokens; the budget hides something of the first two


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(retrieval_budget=256)


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    ids = llm.encode((resources.files("triforce") / "assets" / "dracula.txt").read_text(encoding="utf-8")[:9000])
    return [ids[:length] for length in LENGTHS]


@pytest.fixture(params=[1, 2])
def whims(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Another plan and other budgets at each proposal, and now and then plain decoding for a while."""
    dice, drawn = random.Random(request.param), list[Plan]()

    def whim(self: PlanController, lengths: list[int], widely: bool) -> Plan:
        self._grounded = self._steps + 3 * (dice.random() < 0.1)
        tiers = dice.choice([tiers for tiers, _ in families("draft" in self._parts, max(lengths) > 256)])
        alike = [plan for plan in plans(True, True) if plan.tiers == tiers]
        drawn.append(with_whims(dice.choice(alike), dice, lengths))
        return drawn[-1]

    monkeypatch.setattr(PlanController, "_best", whim)
    monkeypatch.setattr(CostModel, "knows", lambda *_: True)
    monkeypatch.setattr(controller, "EVERY", 1)
    monkeypatch.setattr(cadence, "WORTH", 0.0)
    monkeypatch.setattr(cadence, "LISTEN", 0.0)
    return drawn


def texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_of_many_texts_of_all_lengths(
    llm: LLM, prompts: list[list[int]], temperature: float, whims: list[Plan]
) -> None:
    params = [SamplingParams(temperature, seed=i, n=2, max_tokens=50 + 20 * i, ignore_eos=True) for i in range(3)]
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == texts(llm.generate(prompts, params, mode="ar"))
    assert {output.exactness for output in outputs} == {"bitwise"} and len({plan.tiers for plan in whims}) > 4
    assert {times for plan in whims for _, times in plan.times} == set(TIMES)
    for completion in (completion for output in outputs for completion in output.outputs):
        assert sum(stretch.tokens for stretch in completion.timeline) == len(completion.token_ids)


def test_of_a_conversation(llm: LLM, prompts: list[list[int]], whims: list[Plan]) -> None:
    session, text = Session(llm), list(prompts[1])
    for turn in range(3):
        params = SamplingParams(0.7, seed=turn, max_tokens=40, ignore_eos=True)
        *_, output = session.ask(text, params)
        assert isinstance(output, RequestOutput) and output.mode == "auto"
        assert texts([output]) == texts(llm.generate(text, params, mode="ar"))
        text += output.outputs[0].token_ids + prompts[2][:20]


def test_of_a_model_without_a_draft(prompts: list[list[int]], whims: list[Plan]) -> None:
    alone = LLM(None, None, retrieval_budget=256)
    params = SamplingParams(0.8, seed=5, max_tokens=60, ignore_eos=True)
    assert texts(alone.generate(prompts, params)) == texts(alone.generate(prompts, params, mode="ar"))
    assert not any("draft" in plan.tiers for plan in whims)


def test_a_pilot_that_cheated_would_be_noticed(
    llm: LLM, prompts: list[list[int]], whims: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves the exact tier out now and then."""
    wire, turns = PlanController.wire, iter(range(10**6))

    def cheat(self: PlanController, plan: Plan, prefix: object, live_B: object) -> None:
        wire(self, plan, prefix, live_B)  # type: ignore[arg-type]
        retrieval = self._parts["retrieval"]
        if next(turns) % 2:
            self.top.model = lambda ids, cache, at: retrieval.model(ids, _Blind(cache), at)  # type: ignore[attr-defined]

    monkeypatch.setattr(PlanController, "wire", cheat)
    params = SamplingParams(0.8, seed=5, max_tokens=60, ignore_eos=True)
    assert texts(llm.generate(prompts[0], params)) != texts(llm.generate(prompts[0], params, mode="ar"))


class _Blind:
    """An exact view through which a token's logits come out wrong."""

    def __init__(self, cache: object) -> None:
        self._cache = cache

    def forward(self, model: object, ids_BT: object, at_BJ: object) -> object:
        return self._cache.forward(model, ids_BT, at_BJ).roll(1, -1)  # type: ignore[attr-defined]

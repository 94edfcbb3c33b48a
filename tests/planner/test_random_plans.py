"""A seeded text is that of plain decoding under any decision of a controller: bit for bit on native kernels."""

from __future__ import annotations

import random
from importlib import resources
from typing import Any

import numpy as np
import pytest

from tests.helpers.controlled_batch import replan_always, with_random_budgets
from tests.helpers.simulated_tiers import plans
from triforce import LLM, SamplingParams
from triforce.backends import dispatch
from triforce.engine import sequence_batch
from triforce.engine.tier_builder import apply_plan
from triforce.interface.outputs import RequestOutput
from triforce.planner import Plan, PlanController, PlannedProposal
from triforce.planner.forecast import BUDGET_STEPS, Choice
from triforce.session import Session

if dispatch.native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)

LENGTHS = 700, 350, 90  # tokens; the budget hides a part of the first two


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(retrieval_budget=256)


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    ids = llm.encode((resources.files("triforce") / "assets" / "dracula.txt").read_text(encoding="utf-8")[:9000])
    return [ids[:length] for length in LENGTHS]


@pytest.fixture(params=[1, 2])
def random_plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Draw a plan and budgets at each proposal, and sometimes plain decoding for a while."""
    generator = random.Random(request.param)
    drawn = list[Plan]()

    def random_plan(self: PlanController, lengths: list[int], *amounts: object) -> Choice:
        if generator.random() < 0.1:
            return Choice()
        possible = list(plans("draft" in self.by_name, max(lengths) > 256))
        tiers = generator.choice(sorted({plan.tiers for plan in possible if not plan.plain}))
        same_tiers = [plan for plan in possible if plan.tiers == tiers]
        drawn.append(with_random_budgets(generator.choice(same_tiers), generator, lengths))
        return Choice(drawn[-1])

    monkeypatch.setattr(PlanController, "choose", random_plan)
    replan_always(monkeypatch)
    return drawn


def texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_random_plans_keep_bits_of_texts(
    llm: LLM, prompts: list[list[int]], temperature: float, random_plans: list[Plan]
) -> None:
    params = [SamplingParams(temperature, seed=i, n=2, max_tokens=50 + 20 * i, ignore_eos=True) for i in range(3)]
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == texts(llm.generate(prompts, params, mode="ar"))
    assert {output.exactness for output in outputs} == {"bitwise"} and len({plan.tiers for plan in random_plans}) > 4
    assert {times for plan in random_plans for _, times in plan.budget_factors} == set(BUDGET_STEPS)
    for completion in (completion for output in outputs for completion in output.outputs):
        assert sum(stretch.tokens for stretch in completion.timeline) == len(completion.token_ids)


def test_random_plans_keep_bits_of_conversation(llm: LLM, prompts: list[list[int]], random_plans: list[Plan]) -> None:
    session = Session(llm)
    text = list(prompts[1])
    for turn in range(3):
        params = SamplingParams(0.7, seed=turn, max_tokens=40, ignore_eos=True)
        *_, output = session.ask(text, params)
        assert isinstance(output, RequestOutput) and output.mode == "auto"
        assert texts([output]) == texts(llm.generate(text, params, mode="ar"))
        text += output.outputs[0].token_ids + prompts[2][:20]


def test_random_plans_without_draft_keep_bits(prompts: list[list[int]], random_plans: list[Plan]) -> None:
    single_model = LLM(None, None, retrieval_budget=256)
    params = SamplingParams(0.8, seed=5, max_tokens=60, ignore_eos=True)
    assert texts(single_model.generate(prompts, params)) == texts(single_model.generate(prompts, params, mode="ar"))
    assert not any("draft" in plan.tiers for plan in random_plans)


def test_cheating_engine_is_detected(
    llm: LLM, prompts: list[list[int]], random_plans: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine sometimes leaves out the exact tier."""
    turns = iter(range(10**6))

    def cheat(planned: PlannedProposal, parts: list[Any]) -> None:
        apply_plan(planned, parts)
        *_, retrieval, full = parts
        if next(turns) % 2:
            full.model = lambda *pass_: np.roll(retrieval.model(*pass_), 1, -1)

    monkeypatch.setattr(sequence_batch, "apply_plan", cheat)
    params = SamplingParams(0.8, seed=5, max_tokens=60, ignore_eos=True)
    assert texts(llm.generate(prompts[0], params)) != texts(llm.generate(prompts[0], params, mode="ar"))

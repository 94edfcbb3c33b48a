"""The controller decides by measurements: the cost of each plan, and its acceptance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.helpers.controlled_batch import DEEP, LIVE, known, read, steered
from tests.helpers.simulated_tiers import SimulatedTiers, estimates, force, steer
from triforce.engine.tier_builder import apply_plan, tiers, unlink_tiers
from triforce.planner import CostModel, Plan, PlanController, PlannedProposal, TokensToCome
from triforce.planner.controller import MAX_PENDING, Cadence, RegretAccount
from triforce.planner.forecast import READING_WIDTH, Candidate, Cause, Choice, State, best, candidates
from triforce.planner.planner_config import AMONG_MODELS, CONFIG


def test_controller_hierarchy_pays_when_full_pass_is_slow() -> None:
    deep, _ = steered(known(full=20e-3))
    assert deep.plan.tiers == DEEP.tiers and deep.plan.gammas[1] >= 6 and deep.choice.state is State.SPECULATING
    flat, _ = steered(known(full=1e-4, draft=1e-4))
    assert flat.plan == Plan() and flat.choice.state is State.PLAIN


FLAT = Plan(("draft", "full"), (2,))
PLAIN = Candidate(Plan(), 100.0, 100.0)


@pytest.mark.parametrize(
    ("scores", "plan", "state"),
    [
        ((200.0, 201.0), DEEP, State.SPECULATING),  # a small gain keeps the tiers
        ((200.0, 300.0), FLAT, State.SPECULATING),
        ((50.0, 101.0), Plan(), State.PLAIN),  # and plain decoding
        ((50.0, 0.0), Plan(), State.GUARDED),
    ],
)
def test_plan_is_chosen_by_score(scores: tuple[float, float], plan: Plan, state: State) -> None:
    deep, flat = (Candidate(candidate, s or 200.0, s) for candidate, s in zip((DEEP, FLAT), scores, strict=True))
    choice = best([PLAIN, deep, flat], DEEP)
    assert (choice.plan, choice.state) == (plan, state)
    assert choice.rival == max(
        (candidate for candidate in (PLAIN, deep, flat) if candidate.plan != plan),
        key=lambda candidate: candidate.score,
    )


def test_plan_better_by_upper_bound_alone_is_tried() -> None:
    choice = best([PLAIN, Candidate(FLAT, rate=90.0, score=130.0)], Plan())
    assert choice == Choice(FLAT, 90.0, 130.0, State.TRYING, PLAIN)
    assert best([PLAIN, Candidate(FLAT, rate=110.0, score=112.0)], Plan()).state is State.PLAIN, "nothing was lost"


def test_plans_that_may_not_be_risked_are_told_of_by_their_best() -> None:
    """The first gamma promises less than plain decoding here, and a larger gamma promises more."""
    long = SimulatedTiers({"full": (8e-3, 0.0), "draft": (1e-4, 0.0)}, {}, fused_draft=7e-3)
    expected = estimates(lambda tier, tokens: long.pass_seconds(tier, tokens) if tier in long.costs else 1.0, {})
    unsure = {"draft": np.array([[0.0, 0.7, 0.7]]), "retrieval": np.array([[0.0, 0.1, 0.1]])}
    ranked = candidates(
        replace(expected, accepted_KZ=expected.accepted_KZ | unsure),
        True,
        True,
        [()],
        TokensToCome(64, 64),
        headroom=0.0,
    )
    assert not any(candidate.score for candidate in ranked[1:]) and best(ranked, Plan()).state is State.GUARDED
    draft = next(candidate for candidate in ranked if candidate.plan.tiers == FLAT.tiers)
    assert draft.rate > ranked[0].rate and draft.plan.gammas > (2,)


def test_plain_text_reports_no_attention_from_first_proposal_on() -> None:
    """The process knows the costs of passes, and so weighs plans at once."""
    controller, batch = steered(known(full=1e-4), steps=1)
    assert controller.plan == Plan() and controller.choice.state is State.PLAIN and batch.top.cache.grain == 0


@pytest.mark.parametrize(("full", "plan"), [(20e-3, DEEP), (1e-4, Plan())], ids=["slow", "fast"])
def test_controller_plans_and_engine_applies(full: float, plan: Plan) -> None:
    controller, batch = steered(known(full), steps=0)

    def state() -> tuple[object, ...]:
        links = [(tier.gamma, tier.below) for tier in controller.tiers]
        return links, dict(controller.view.budget_factors), batch.top.cache.grain

    state_before = state()
    unit = batch.top.cache.grain
    planned = controller.steer(batch.prefix, LIVE)
    assert state() == state_before and unit > 0 and planned.plan.tiers == plan.tiers
    planned = PlannedProposal(replace(planned.plan, budget_factors=((8, 2.0),)), planned.grain)
    apply_plan(planned, controller.tiers)
    linked = tiers(batch.top)
    assert [tier.name for tier in linked] == [*plan.tiers]
    assert [tier.gamma for tier in linked] == [*planned.plan.gammas, 1]
    assert controller.view.budget_factors == ({} if plan.plain else {8: 2.0})
    assert batch.top.cache.grain == planned.grain == (0 if plan.plain else unit)


@pytest.mark.parametrize(("expected", "drafts"), [(10, False), (1000, True)])
def test_short_text_does_not_pay_for_reading(expected: int, drafts: bool) -> None:
    """The draft would save some 15 ms of a token, and takes a second to read the text."""
    costs = known(full=20e-3, retrieval=1.0)
    controller = PlanController(unlink_tiers(read(None).top), costs)
    for _ in range(20):
        controller.observe_reading(READING_WIDTH, 1.0)
    for unread_tokens in (0, READING_WIDTH):
        choice = controller.choose([100], TokensToCome(1000, expected), unread_tokens)
        assert ("draft" in choice.plan.tiers) == (drafts or not unread_tokens)


def test_plan_of_earlier_text_is_weighed_again_before_draft_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = known(full=20e-3)
    batch = read(costs)
    weighed = Mock(return_value=Choice())
    monkeypatch.setattr(PlanController, "choose", weighed)
    state = replace(Choice(DEEP), rate=100.0), RegretAccount(20e-3), Cadence(replan_at=1e9, due_at=1e9)
    assert batch.controller
    costs.state_by_text_kind[batch.controller.beliefs.acceptance.text_kind(batch.prefix.lengths_B.tolist())] = state
    batch.step()
    assert weighed.call_count == 1 and batch.controller.awaited_draft is None


def test_account_bounds_what_trials_lose() -> None:
    account = RegretAccount(plain_seconds=1.0)
    credit = CONFIG.allowed_loss * CONFIG.credit_tokens
    assert account.headroom == pytest.approx(credit)
    account.record(tokens=1.0, seconds=3.0, plain=False)
    assert account.headroom < 0
    account.record(tokens=100.0, seconds=500.0, plain=True)  # plain decoding loses nothing
    assert account.headroom == pytest.approx(credit - 2.0 + 101 * CONFIG.allowed_loss)


def test_controller_loss_is_thought_about_at_once() -> None:
    controller, batch = steered(known(full=20e-3))
    controller._cadence.due_at = 1e9  # only a loss causes a replan
    for _ in range(3):
        assert controller.plan == DEEP or controller.plan.tiers == DEEP.tiers
        controller.observe([100], 1, 0.01)
        steer(controller, batch.prefix)
    asked = controller.choose = Mock(return_value=Choice())  # type: ignore[method-assign]
    controller.observe([100], 1, 1.0)  # a second for a token
    steer(controller, batch.prefix)
    assert controller.plan == Plan() and asked.call_count == 1 and controller.choice.cause is Cause.LOSS


def test_losses_make_bounds_lower_until_something_is_won() -> None:
    controller, batch = steered(known(full=20e-3))

    def least() -> float:
        controller.choose([100], TokensToCome(100, 100), 0)
        return float(controller.estimates.accepted_KZ["draft"][0, 0])  # type: ignore[union-attr]

    bound_before = least()
    for won, losses in ((1.0, 0), (-1.0, 1)):  # a machine that was interrupted lost nothing
        controller.account.gain_seconds = won
        force(controller, DEEP, batch.prefix)
        controller.observe([100], 1, 2.0)
        steer(controller, batch.prefix)
        assert controller.choice.cause is Cause.LOSS and controller.account.losses == losses
    assert least() < bound_before
    controller.account.gain_seconds = 0.0
    controller.account.record(tokens=100.0, seconds=1e-3, plain=False)
    assert controller.account.losses == 0 and least() == pytest.approx(bound_before)
    assert RegretAccount(1.0, losses=3).for_next_text().losses == 0


def test_controller_of_plain_decoding_learns_and_wakes() -> None:
    controller, batch = steered(known(full=1e-4), steps=1)
    assert controller.plan == Plan()
    controller._cadence.due_at = controller._cadence.replan_at = 1e9
    concluded = Mock(wraps=controller.update_beliefs)
    controller.update_beliefs = concluded  # type: ignore[method-assign]
    for _ in range(MAX_PENDING + 2):
        controller.observe([100], 1, 1e-4)
        steer(controller, batch.prefix)
    assert concluded.call_count == 1 and controller.plan == Plan()
    controller.choose = Mock(return_value=Choice(DEEP))  # type: ignore[method-assign]
    controller._cadence.due_at = controller._cadence.replan_at = controller._cadence.elapsed
    steer(controller, batch.prefix)
    assert controller.choice.plan == DEEP


def test_no_pass_is_forgotten_before_it_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is not fused runs the product of both gammas in passes per proposal."""
    controller, batch = steered(known(full=20e-3), steps=1)
    controller.choice, controller._cadence.due_at, drafts = Choice(Plan(DEEP.tiers, (8, 16))), 1e9, list[int]()
    steer(controller, batch.prefix)
    observe = controller.costs.passes.observe

    def counted(tier: str, *how: Any) -> float:
        drafts.extend([how[-1]] if tier == "draft" else [])
        return observe(tier, *how)

    monkeypatch.setattr(controller.costs.passes, "observe", counted)
    for _ in range(41):  # the first one teaches no cost
        for _ in range(8 * 16):
            controller.by_name["draft"].counters.record_passes(LIVE, 1e-6)
        controller.observe([100], 1, 1e-3)
        steer(controller, batch.prefix)
    controller.update_beliefs(batch.prefix)
    assert controller.plan == controller.choice.plan and sum(drafts) == 40 * 8 * 16


def test_controller_plain_decoding_is_retried_where_gain_is_small() -> None:
    controller, batch = steered(known(full=20e-3), steps=0)
    for gain, least_probes in ((1.5, 2), (3.0, 0)):
        probed = []
        steer(controller, batch.prefix)
        controller._cadence.due_at = 1e9
        controller.choice = replace(controller.choice, rate=gain * controller.plain_rate)
        for _ in range(3 * CONFIG.probe_every):
            steer(controller, batch.prefix)
            probed.append(controller.plan == Plan() and controller.choice_in_use.state is State.PROBING)
        assert least_probes * CONFIG.probe_proposals <= sum(probed) <= 2 * least_probes * CONFIG.probe_proposals


def test_controller_overhead_is_shared_among_passes() -> None:
    controller, batch = steered(CostModel(), steps=1)
    force(controller, Plan(("draft", "full"), (1,)), batch.prefix)
    for _ in range(20):
        controller.by_name["full"].counters.record_passes(LIVE, 1e-3)
        controller.by_name["draft"].counters.record_passes(LIVE, 2e-4)
        controller.observe([100], 1, 1.6e-3)
    controller.update_beliefs(batch.prefix)
    assert controller.costs.passes.seconds(AMONG_MODELS, 1, 1, 100) == pytest.approx(1.2e-3, rel=1e-2)
    assert controller.costs.passes.seconds("draft", 1, 1, 0) == pytest.approx(4e-4, rel=1e-2)


def test_controller_acceptance_carries_to_next_batch() -> None:
    costs = known(full=20e-3)
    controller, batch = steered(costs)
    counters = controller.by_name["draft"].counters
    for _ in range(50):
        counters.record_verdict(np.array([4]), np.array([0]), LIVE)
        controller.observe([100], 1, 1e-3)
    controller.update_beliefs(batch.prefix)
    assert controller.beliefs.acceptance.estimate("draft", 100)[0] < 0.15
    assert steered(costs)[0].beliefs.acceptance.estimate("draft", 100)[0] < 0.2
    next_controller, _ = steered(known(full=20e-3))
    assert next_controller.beliefs.acceptance.estimate("draft", 100)[0] > 0.6


def test_controller_observes_attention_only_for_retrieval(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, batch = steered(known(full=20e-3), steps=1)
    assert batch.top.cache.grain > 0 and controller.plan.tiers == DEEP.tiers
    plans = iter([Choice(), Choice(DEEP), Choice(DEEP)])
    monkeypatch.setattr(PlanController, "choose", lambda *how: next(plans))
    steer(controller, batch.prefix)
    assert controller.plan == Plan() and batch.top.cache.grain == 0
    controller._cadence.due_at = controller._cadence.replan_at = 0.0
    steer(controller, batch.prefix)
    assert controller.plan == Plan() and batch.top.cache.grain > 0  # the exact tier observes attention first
    steer(controller, batch.prefix)
    assert controller.plan == DEEP

"""Chooses the plan of a batch between proposals of the full tier: observe, estimate, choose; the engine applies it.

The controller observes the seconds of forward passes (`CostModel`), the accepted share of each tier's draft tokens
(`AcceptanceTracker`), and the tokens that n-grams of the text would have proposed (`NgramHindsight`). `Beliefs` holds
all three. Under `seeded` no decision can change a text. Under `rejection` and `block` no decision depends on a token
that is still to be drawn, so the distribution is exact; the text of a seed depends on the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from time import perf_counter
from typing import Any

from triforce.distributed.group import ALONE, TPGroup
from triforce.interface.explain import PlanReport, TierBelief, WeighedPlan
from triforce.kvcache import RetrievalView
from triforce.planner.cost_model import CostModel
from triforce.planner.forecast import (
    UNKNOWN_LENGTH,
    Beliefs,
    Candidate,
    Cause,
    Choice,
    State,
    TokensToCome,
    best,
    budget_options,
    candidates,
)
from triforce.planner.plan import PLAIN, BudgetFactors, Estimates, Plan, PlannedProposal
from triforce.planner.planner_config import CONFIG, FULL, READING
from triforce.ragged import Bools
from triforce.speculation import Proposer, SequenceState, Tier
from triforce.speculation.draft import MAX_PASSES
from triforce.speculation.ngram import STRIDE

MIN_LOSS_SHARE = 1 / 8
"""Least `RegretAccount.loss_share`."""
LOSS_SHARE_RECOVERY = 1.1
"""Factor of `RegretAccount.loss_share` after a text without speculation."""


@dataclass(slots=True)
class RegretAccount:
    """Gains and losses of one batch against plain decoding, in seconds: the budget of a conservative bandit.

    plain_seconds: seconds of one step of plain decoding; 0: not known yet. gain_seconds: negative if speculation lost.
    allowed_seconds: `CONFIG.allowed_loss` times the time that plain decoding would take for the text so far.
    loss_share: share of the allowed loss that this text may use, below 1 if earlier texts of its kind lost. losses:
    how many times plans were weighed because of a loss, and the headroom was then negative. It is reset when
    `gain_seconds` is positive.
    """

    plain_seconds: float = 0.0
    gain_seconds: float = 0.0
    allowed_seconds: float = 0.0
    loss_share: float = 1.0
    losses: int = 0

    def record(self, tokens: float, seconds: float, plain: bool) -> None:
        """Record proposals. tokens: of each row. plain: they were plain decoding, which gains and loses nothing."""
        self.allowed_seconds += CONFIG.allowed_loss * self.plain_seconds * tokens
        if not plain and self.plain_seconds:
            self.gain_seconds += tokens * self.plain_seconds - seconds
            if self.gain_seconds > 0:
                self.losses = 0

    @property
    def headroom(self) -> float:
        """Seconds that may be lost from here on."""
        return self.gain_seconds + self.loss_share * (
            self.allowed_seconds + CONFIG.allowed_loss * self.plain_seconds * CONFIG.credit_tokens
        )

    @property
    def caution(self) -> float:
        """Distance of the lower bound of acceptance from its mean, in standard deviations: see `CONFIG.caution`."""
        return CONFIG.caution * (1 + self.losses)

    def for_next_text(self) -> RegretAccount:
        """Return the account of the next text of the kind. After a loss, that text may lose half as much.

        The least share of the allowed loss is an eighth.
        """
        loss_share = (
            1.0 if self.gain_seconds > 0 else self.loss_share * (LOSS_SHARE_RECOVERY if self.gain_seconds == 0 else 0.5)
        )
        return RegretAccount(self.plain_seconds, loss_share=min(1.0, max(MIN_LOSS_SHARE, loss_share)))


@dataclass(slots=True)
class Cadence:
    """Times at which one batch scans its text for n-grams and weighs plans, in seconds of decoding (`elapsed`).

    due_at: the earlier of `scan_at` and `replan_at`. N-grams in the plan make scans needless: then it is `replan_at`.
    backoff: factor of the time until plans are weighed again. It grows while plain decoding stays best, in this text
    and in the next ones of its kind. Above 1 it also lengthens the time until the next scan, and raises the number of
    n-gram hits at which plans are weighed at once.
    """

    elapsed: float = 0.0
    due_at: float = 0.0
    scan_at: float = 0.0
    replan_at: float = 0.0
    backoff: float = 0.0
    _replan_seconds: float = 0.0
    _ngram_hits: int = 0

    @property
    def cause(self) -> Cause | None:
        """Cause of weighing plans now: they are due, or n-grams predicted much of the latest text. None: no cause."""
        if self.elapsed >= self.replan_at:
            return Cause.TIME
        return Cause.REPEATS if self._ngram_hits >= CONFIG.replan_hits * max(1.0, self.backoff) else None

    def record_scan(self, hits: int, seconds: float, min_wait: float) -> None:
        """Record a scan. hits: tokens that n-grams predicted.

        min_wait: expected seconds until the rows together gain the tokens between two places.
        """
        self._ngram_hits += hits
        self.scan_at = self.elapsed + max(min_wait, CONFIG.scan_ratio * seconds * max(1.0, self.backoff))
        self.due_at = min(self.scan_at, self.replan_at)

    def record_replan(self, seconds: float, plan: Plan) -> None:
        """Record that weighing plans took `seconds` and chose `plan`."""
        self._replan_seconds = seconds
        self._ngram_hits = 0
        max_backoff = CONFIG.max_backoff if plan.plain else 1.0
        self.backoff = min(self.backoff + CONFIG.backoff_step, max_backoff)
        self.replan_at = self.elapsed + CONFIG.replan_ratio * seconds * self.backoff
        self.due_at = self.replan_at if "ngram" in plan.tiers else min(self.scan_at, self.replan_at)

    def for_next_text(self, won: bool, seconds: float) -> Cadence:
        """Return the cadence of the next text of the kind. won: this text gained time.

        seconds: upper bound of the seconds of the next text. That text keeps the rest of both waits, with two
        exceptions. If `won`, it is scanned at once. A full wait is `CONFIG.replan_ratio` times the seconds of the
        latest weighing, times the backoff. If `seconds` exceeds half of it, plans are weighed at once.
        """
        next_cadence = Cadence()
        next_cadence.backoff = min(self.backoff, 1.0) if won else self.backoff
        next_cadence._replan_seconds = self._replan_seconds
        if not won:
            next_cadence.scan_at = max(0.0, self.scan_at - self.elapsed)
        if seconds <= CONFIG.replan_ratio * self._replan_seconds * self.backoff / 2:
            next_cadence.replan_at = max(0.0, self.replan_at - self.elapsed)
        next_cadence.due_at = min(next_cadence.scan_at, next_cadence.replan_at)
        return next_cadence


MAX_PENDING = 256  # proposals after which beliefs are updated
NO_PENDING = 0.0, 0.0, 0
"""Tokens of each row, seconds, and number of the pending proposals: those from which beliefs have not learnt yet."""


class PlanController:
    """Decides for one batch which tiers draft, how many tokens, and how much the retrieval tier reads.

    It observes tiers and changes none. `SequenceBatch._plan` in `engine/sequence_batch.py` calls `steer` before each
    proposal. If the plan has changed, `apply_plan` in `engine/tier_builder.py` links the tiers, and sets gammas and
    budgets.

    tiers: all tiers, n-grams first and the full tier last, which is linked to none below it (see
    `tier_builder.unlink_tiers`).
    temperature: the mean of the batch. clock: returns seconds, and measures what weighing plans takes. ranks: all
    follow the decisions of rank 0, as their clocks differ.
    """

    def __init__(
        self,
        tiers: Sequence[Proposer],
        costs: CostModel,
        temperature: float = 1.0,
        clock: Callable[[], float] = perf_counter,
        ranks: TPGroup = ALONE,
    ) -> None:
        self.costs = costs
        self._clock = clock
        self.ranks = ranks
        self.tiers = list(tiers)
        self.by_name = {tier.name: tier for tier in tiers}
        self.view: RetrievalView = self.by_name["retrieval"].cache  # type: ignore[attr-defined]
        self.beliefs = Beliefs(self.by_name, costs, temperature)
        self.choice, self.plan, self.name = Choice(), PLAIN, str(PLAIN)
        """The choice, and the plan in use with its name. The plan differs from the choice's while plain decoding is
        probed, and before the tiers of the choice are ready (see `_follow_choice`)."""
        self.awaited_draft: Tier[Any] | None = None
        """The draft's tier, if the chosen plan waits until it has read the texts."""
        self.budget: Callable[[int], int] | None = None
        """Tokens that the retrieval tier reads, by the length of the context; None if the plan sets no budget."""
        self.account = RegretAccount()
        self._cadence = Cadence()
        self.estimates: Estimates | None = None
        self.candidates: list[Candidate] = []
        """The best plan of each set of tiers, by the latest estimates."""
        self.budget_factors: dict[int, float] = {}
        """Factors of the default budget in the latest estimates, by bits of a row's length."""
        self._retrieval_grain: int = self.by_name["full"].cache.grain  # type: ignore[attr-defined]
        """Grain of the attention mass that the retrieval tier needs; 0: its policy needs none."""
        self._grain = self._retrieval_grain
        """Grain of the attention that the full tier observes in the latest planned proposal."""
        self._proposals = self._first_replan = self._last_plain = self._scans = 0
        self._text_kind = 0, 0, 0  # at the first proposal, see `AcceptanceTracker.text_kind`
        self.lengths: Sequence[int] = ()  # of the texts before the latest proposal
        self._pending = NO_PENDING
        self._max_pending = MAX_PENDING
        self._just_switched, self._first_seconds = False, 0.0  # whether the plan is new; seconds of its first proposal

    @property
    def plain_rate(self) -> float:
        """Expected tokens per second of each row in plain decoding; 0: not known yet."""
        return 1 / self.account.plain_seconds if self.account.plain_seconds else 0.0

    @property
    def choice_in_use(self) -> Choice:
        """The latest choice, with the reason of the plan in use.

        While plain decoding is probed, or goes on until a plan with the retrieval tier may begin, this is plain
        decoding.
        """
        probes = self.plan.plain and not self.choice.plan.plain
        return Choice(rate=self.plain_rate, state=State.PROBING) if probes else self.choice

    @property
    def planned(self) -> PlannedProposal:
        """The plan of the next proposal, and the grain of the attention that the full tier observes in it."""
        return PlannedProposal(self.plan, self._grain)

    def steer(
        self, prefix: SequenceState, live_B: Bools, to_come: Callable[[], TokensToCome] = lambda: UNKNOWN_LENGTH
    ) -> PlannedProposal:
        """Return the plan of the next proposal. Most calls keep the plan, without weighing plans.

        to_come: returns the tokens still to come.
        """
        if self._proposals == 0:
            self._warm_start(prefix, live_B, to_come().most)
        if self._pending[-1] >= self._max_pending:
            self.update_beliefs(prefix)
        due = self._cadence.elapsed >= self._cadence.due_at and self._proposals >= self._first_replan
        self._proposals += 1
        if self.ranks.broadcast(due or self._over_headroom):
            self._replan(prefix, live_B, to_come())
        self.awaited_draft = None
        if self.plan.plain and self.choice.plan.plain:
            self._last_plain = self._proposals
            self._grain = 0
        else:
            self._follow_choice(prefix, live_B)
        return self.planned

    def observe_reading(self, tokens: int, seconds: float) -> None:
        """Record a pass by which the draft read `tokens` tokens of one text."""
        self.costs.passes.observe(READING, tokens, 1, 0, seconds)

    def observe(self, lengths: Sequence[int], new_tokens: int, seconds: float) -> None:
        """Record a proposal of `seconds`, in which texts of these lengths gained `new_tokens` tokens in all."""
        self._cadence.elapsed += seconds
        if self._just_switched:  # the processor's caches hold another plan's data, so no cost is learnt
            self._just_switched = False
            self._first_seconds = seconds
            for tier in self.tiers:
                tier.counters.new_passes()
        tokens, pending_seconds, proposals = self._pending
        self.lengths = lengths
        self._pending = (tokens + new_tokens / len(lengths), pending_seconds + seconds, proposals + 1)

    def update_beliefs(self, prefix: SequenceState) -> None:
        """Learn from the pending proposals, all of one plan. Called before the plan changes, and before rows leave."""
        (tokens, seconds, proposals), self._pending = self._pending, NO_PENDING
        if not proposals:
            return
        expected_seconds = self.beliefs.learn_passes(self.plan, self.lengths, seconds - self._first_seconds)
        if self._first_seconds:  # add the plan's first proposal, as at most `CONFIG.max_first_factor` later ones
            later_seconds = (
                expected_seconds / (proposals - 1) if proposals > 1 else CONFIG.first_steps * self.account.plain_seconds
            )
            expected_seconds = expected_seconds + min(self._first_seconds, CONFIG.max_first_factor * later_seconds)
            self._first_seconds = 0.0
        if not self.account.plain_seconds and self.plan.plain:
            self.account.plain_seconds = expected_seconds / proposals
        # seconds beyond these bounds are due to other load on the machine
        min_seconds = expected_seconds / CONFIG.outlier
        max_seconds = expected_seconds * CONFIG.outlier
        self.account.record(tokens, min(max(seconds, min_seconds), max_seconds), self.plan.plain)
        self.beliefs.learn_verdicts(self.plan, prefix.lengths_B, proposals)

    def close(self, prefix: SequenceState) -> None:
        """Keep what was learnt for the next texts. Called when these texts are done.

        Choice, account and cadence are kept for their kind, unless the kind has changed since the first proposal. A
        choice with n-grams, or in state `GUARDED`, is replaced by plain decoding in state `PLAIN`.
        """
        self.update_beliefs(prefix)
        if self.lengths and self.beliefs.acceptance.text_kind(self.lengths) == self._text_kind:
            keeps_plan = "ngram" not in self.choice.plan.tiers and self.choice.state is not State.GUARDED
            choice = self.choice if keeps_plan else Choice(rate=self.plain_rate, state=State.PLAIN)
            self.costs.state_by_text_kind[self._text_kind] = choice, self.account, self._cadence

    def switch(self, plan: Plan) -> None:
        """Use this plan from the next proposal on. Pending proposals are dropped."""
        sets_budget = "retrieval" in plan.tiers and self.view.setting.budget.adjustable
        self.plan = plan
        self.name = str(plan)
        self.budget = self.view.budget if sets_budget else None
        self._pending = NO_PENDING
        self._just_switched = self._proposals > 1
        drafted = prod(gamma for tier, gamma in zip(plan.tiers, plan.gammas, strict=False) if tier != "ngram")
        self._max_pending = min(MAX_PENDING, MAX_PASSES // drafted)  # counters remember no more than `MAX_PASSES`

    def update_rows(self, lengths: Sequence[int], temperature: float) -> None:
        """Record that rows joined or left; `lengths` are those of the rows now. Call `update_beliefs` before."""
        self.beliefs.acceptance.set_temperature(temperature)
        if old_seconds := self.account.plain_seconds:
            # A step's seconds depend on its rows, so gains are now counted against plain decoding of the new rows.
            self.account.plain_seconds = self.costs.passes.seconds(FULL, 1, len(lengths), sum(lengths))
            # The chosen plan is assumed to stay faster than plain decoding by the same factor.
            self.choice = replace(self.choice, rate=self.choice.rate * old_seconds / self.account.plain_seconds)

    @property
    def _over_headroom(self) -> bool:
        """Whether the pending proposals have lost more than the headroom, and more than a step of plain decoding takes.

        Plain decoding loses nothing.
        """
        tokens, seconds, _ = self._pending
        lost_seconds = seconds - tokens * self.account.plain_seconds
        return not self.plan.plain and lost_seconds > max(self.account.headroom, self.account.plain_seconds)

    def _warm_start(self, prefix: SequenceState, live_B: Bools, remaining_tokens: int) -> None:
        """Start from the choice, account and cadence of the latest text of the kind, if there was one.

        Plans are weighed at once if the choice needs a draft that has not read this text, which a short text may not be
        worth.
        A process without measured passes begins with some steps of plain decoding.
        """
        self._text_kind = self.beliefs.acceptance.text_kind(prefix.lengths_B[live_B].tolist())
        kind_state = self.ranks.broadcast(self.costs.state_by_text_kind.get(self._text_kind))
        if kind_state:
            self.choice, account, cadence = kind_state
            self.account = account.for_next_text()
            self._cadence = cadence.for_next_text(account.gain_seconds > 0, remaining_tokens * account.plain_seconds)
            if self._draft_to_await(self.choice.plan, prefix, live_B):
                self._cadence.due_at = self._cadence.replan_at = 0.0
        elif not self.costs.passes.confirmed:
            self._first_replan = CONFIG.first_proposals
            self._cadence.due_at = CONFIG.first_seconds

    def _replan(self, prefix: SequenceState, live_B: Bools, to_come: TokensToCome) -> None:
        """Scan one row for n-grams that repeat, and choose a plan if that is due."""
        began = self._clock()
        rows = live_B.nonzero()[0].tolist()
        self._scans += 1
        hits = self.beliefs.hindsight.update(prefix, rows[self._scans % len(rows)])
        rate = len(rows) * (self.choice.rate or self.plain_rate)  # tokens per second of all rows
        self._cadence.record_scan(hits, self._clock() - began, STRIDE / rate if rate else 0.0)
        if cause := Cause.LOSS if self._over_headroom else self._cadence.cause:
            self.update_beliefs(prefix)
            self.account.losses += cause is Cause.LOSS and self.account.headroom < 0
            lengths = prefix.lengths_B[live_B].tolist()
            self.choice = replace(self.choose(lengths, to_come, self._unread_tokens(prefix, live_B)), cause=cause)
            self._cadence.record_replan(self._clock() - began, self.choice.plan)
        self.choice = self.ranks.broadcast(self.choice)

    def choose(self, lengths: list[int], to_come: TokensToCome, unread_tokens: int) -> Choice:
        """Return the best plan for texts of these lengths. unread_tokens: those that a draft has to read first."""
        sparse = any(length > self.view.budget(length) for length in lengths)
        budgets: list[BudgetFactors] = budget_options(self.view, lengths) if sparse else [()]
        self.estimates = self.beliefs.estimates(lengths, self.account.caution, budgets)
        self.account.plain_seconds = float(self.estimates.seconds_KW[FULL][0, 1])
        self.budget_factors = dict(budgets[0])
        headroom = self.account.headroom
        reading_seconds = self.beliefs.reading_seconds(unread_tokens) if unread_tokens else 0.0
        self.candidates = candidates(
            self.estimates, "draft" in self.by_name, sparse, budgets, to_come, headroom, reading_seconds
        )
        return best(self.candidates, self.choice.plan)

    def _unread_tokens(self, prefix: SequenceState, live_B: Bools) -> int:
        """Return the number of tokens that a draft model has to read before it can propose."""
        draft = self.by_name.get("draft")
        if not isinstance(draft, Tier):
            return 0
        lags = (prefix.lengths_B - draft.cache.lengths_B).tolist()
        return sum(min(lags[b], draft.cache.most_read) for b in draft.lagging_rows(prefix, live_B))

    def _draft_to_await(self, plan: Plan, prefix: SequenceState, live_B: Bools) -> Tier[Any] | None:
        """Return the draft's tier, if it has to read texts before `plan` begins; else None.

        A draft in use below n-grams goes on with texts that it has read before, because it catches up when n-grams
        find no match.
        """
        if "draft" not in plan.tiers or not isinstance(draft := self.by_name["draft"], Tier):
            return None
        catches_up = "ngram" in plan.tiers and "draft" in self.plan.tiers
        rows = draft.lagging_rows(prefix, live_B)
        return draft if any(not (catches_up and draft.cache.lengths_B[b]) for b in rows) else None

    def _follow_choice(self, prefix: SequenceState, live_B: Bools) -> None:
        """Switch to the chosen plan. A plan with the retrieval tier waits for a proposal that observes attention.

        At the start of a text the end of the prefill has observed it. A plan with a draft model waits until the draft
        has read the texts, which `SequenceBatch.catch_up` lets it do between two proposals.
        If speculation promises little, some proposals probe plain decoding, so that its cost stays known.
        """
        chosen = self.choice.plan
        proposals_since_plain = self._proposals - self._last_plain
        probe_due = proposals_since_plain >= CONFIG.probe_every
        in_probe = proposals_since_plain % CONFIG.probe_every < CONFIG.probe_proposals
        probing = probe_due and in_probe and self.choice.rate < 2 * self.plain_rate
        next_plan = PLAIN if self.ranks.broadcast(probing) else chosen
        self.awaited_draft = self._draft_to_await(next_plan, prefix, live_B)
        if self.awaited_draft:
            next_plan = PLAIN if "draft" in self.plan.tiers else self.plan
        ready = "retrieval" not in next_plan.tiers or self._grain == self._retrieval_grain
        self._grain = self._retrieval_grain if "retrieval" in chosen.tiers else 0
        if ready and next_plan != self.plan:
            self.update_beliefs(prefix)
            self.switch(next_plan)


WIDE = 8  # tokens of the wide pass whose cost is reported


def report(controller: PlanController) -> PlanReport | None:
    """Return costs and plans of the latest weighing, with the acceptance and the account as they are now.

    Returns None if plans were never weighed, or nothing was proposed.
    """
    if controller.estimates is None or not controller.lengths:
        return None
    beliefs = []
    for name, seconds_KW in controller.estimates.seconds_KW.items():
        tier = name.split()[0]
        (narrow, wide) = (1000 * seconds_KW[0, [1, WIDE]]).tolist()
        longest = max(controller.lengths)
        factor = controller.budget_factors.get(longest.bit_length(), 1.0) if tier == "retrieval" else 1.0
        mean, deviation = (None, 0.0) if tier == FULL else controller.beliefs.acceptance.estimate(tier, longest, factor)
        if tier in controller.by_name:
            passes = controller.costs.passes.of(name).count
            tokens = controller.beliefs.acceptance.tokens(tier)
            beliefs.append(TierBelief(name, (narrow, wide), passes, mean, deviation, tokens))
    weighed = [WeighedPlan(str(option.plan), option.rate, option.score) for option in controller.candidates]
    return PlanReport(beliefs, weighed, controller.account.gain_seconds, controller.account.headroom)

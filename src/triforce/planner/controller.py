"""Chooses the plan of a batch between proposals of the full tier: observe -> forecast -> choose; the engine applies it.

Observed are the seconds of forward passes (`CostModel`), the accepted share of each tier's draft tokens
(`AcceptanceTracker`), and what n-grams of the text would have proposed (`NgramHindsight`): all of it is `Beliefs`.
Under `seeded` no decision can change a text; under `rejection` none depends on a token that is still to be drawn, so
the distribution is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from time import perf_counter

from triforce.distributed.group import ALONE, TPGroup
from triforce.interface.explain import PlanReport, TierBelief, WeighedPlan
from triforce.kvcache import RetrievalView
from triforce.planner.cost_model import CostModel
from triforce.planner.forecast import Beliefs, Candidate, Cause, Choice, State, best, budget_options, candidates
from triforce.planner.plan import PLAIN, BudgetFactors, Estimates, Plan, PlannedProposal
from triforce.planner.planner_config import CONFIG, FULL
from triforce.ragged import Bools
from triforce.speculation import Proposer, SequenceState
from triforce.speculation.draft import REMEMBERED
from triforce.speculation.ngram import STRIDE

LEAST_TRUST = 1 / 8
REGAINED = 1.1


@dataclass(slots=True)
class Account:
    """Account of one batch. plain: seconds of a step of plain decoding; 0: not known yet."""

    plain: float = 0.0
    won: float = 0.0  # seconds, negative where speculation lost
    allowed: float = 0.0  # seconds that the text so far may lose
    trust: float = 1.0  # part of what may be lost, after texts of the kind that lost
    losses: int = 0  # times that more was lost than allowed, since `won` was last positive

    def enter(self, tokens: float, seconds: float, plain: bool) -> None:
        """Enter proposals: tokens of each row, and whether they were plain decoding, which wins nothing."""
        self.allowed += CONFIG.allowed_loss * self.plain * tokens
        if not plain and self.plain:
            self.won += tokens * self.plain - seconds
            if self.won > 0:
                self.losses = 0

    @property
    def headroom(self) -> float:
        """Seconds that may be lost."""
        return self.won + self.trust * (self.allowed + CONFIG.allowed_loss * self.plain * CONFIG.credit_tokens)

    @property
    def caution(self) -> float:
        """Standard deviations below the mean at which a plan counts as no risk: each loss says that beliefs are off."""
        return CONFIG.caution * (1 + self.losses)

    def next(self) -> Account:
        """The account of the next text of the kind: it may lose half as much where this one lost, down to an eighth."""
        trust = 1.0 if self.won > 0 else self.trust * (REGAINED if self.won == 0 else 0.5)
        return Account(self.plain, trust=min(1.0, max(LEAST_TRUST, trust)))


class Cadence:
    """The cadence of one batch. elapsed: seconds of decoding; due_at: when it is time to listen, or to weigh plans.

    patience: times as long until plans are weighed. It grows while plain decoding stays best, in this text and in the
    next ones of its kind. From 1 on, as many times less is listened, too, and as many more n-grams call for a thought.
    """

    def __init__(self) -> None:
        self.elapsed = self.due_at = self.listen_at = self.think_at = 0.0
        self.patience = 0.0
        self._took = 0.0
        self._heard = 0

    @property
    def cause(self) -> Cause | None:
        """Reason to weigh plans now: it is time, or n-grams predicted much of the text since; None: there is none."""
        if self.elapsed >= self.think_at:
            return Cause.TIME
        return Cause.REPEATS if self._heard >= CONFIG.heard_tokens * max(1.0, self.patience) else None

    def heard(self, hits: int, seconds: float, least: float) -> None:
        """Note tokens that n-grams predicted; hearing of them took so many seconds. least: until there is a place."""
        self._heard += hits
        self.listen_at = self.elapsed + max(least, CONFIG.listen_ratio * seconds * max(1.0, self.patience))
        self.due_at = min(self.listen_at, self.think_at)

    def thought(self, seconds: float, plan: Plan) -> None:
        """Note that weighing plans took so many seconds, and which one was best."""
        self._took = seconds
        self._heard = 0
        most = CONFIG.most_patience if plan.plain else 1.0
        self.patience = min(self.patience + CONFIG.patience_step, most)
        self.think_at = self.elapsed + CONFIG.think_ratio * seconds * self.patience
        self.due_at = self.think_at if "ngram" in plan.tiers else min(self.listen_at, self.think_at)

    def next(self, won: bool, seconds: float) -> Cadence:
        """The cadence of the next text of the kind, which may take so many seconds. won: whether this one paid.

        What is left of the waits goes over; a text that takes long weighs plans at once.
        """
        following = Cadence()
        following.patience = min(self.patience, 1.0) if won else self.patience
        following._took = self._took
        if not won:
            following.listen_at = max(0.0, self.listen_at - self.elapsed)
        if seconds <= CONFIG.think_ratio * self._took * self.patience / 2:
            following.think_at = max(0.0, self.think_at - self.elapsed)
        following.due_at = min(following.listen_at, following.think_at)
        return following


ENDLESS = 10**6  # tokens to come, where nobody says how many
TOGETHER = 256  # proposals that are learnt from together, at most
NOTHING = 0.0, 0.0, 0  # tokens of a row, seconds and proposals that nothing was learnt from yet


class PlanController:
    """Decides for one batch which tiers draft, how many tokens, and how much the retrieval tier reads.

    It observes tiers and changes none: `tier_builder.apply_plan` applies what `steer` returns.
    tiers: all tiers, n-grams first and the full tier last, none linked to another (see `tier_builder.unlinked`).
    temperature: the mean of the batch. clock: seconds, for what weighing plans takes. ranks: all follow rank 0, as
    their clocks differ.
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
        """What was chosen; the plan that is followed is another one to probe, and until attention was observed."""
        self.budget: Callable[[int], int] | None = None
        """Tokens that the retrieval tier reads of a context of so many, where the plan chooses that."""
        self.account = Account()
        self._cadence = Cadence()
        self.estimates: Estimates | None = None
        self.found: list[Candidate] = []
        """The latest estimates, and the best plan of each choice of tiers by them."""
        self.budget_factors: dict[int, float] = {}
        """Times the usual budget, by bits of a row's length, that these are of."""
        self._retrieval_grain: int = self.by_name["full"].cache.grain  # type: ignore[attr-defined]
        """What the retrieval tier selects by."""
        self._grain = self._retrieval_grain
        """What the full tier was asked to observe latest."""
        self._proposals = self._first_thought = self._plain_at = self._listened = 0
        self._kind = 0, 0, 0  # of the texts at their first proposal, see `AcceptanceTracker.kind`
        self.lengths: Sequence[int] = ()  # of the texts before the latest proposal
        self._unlearnt = NOTHING
        self._together = TOGETHER
        self._fresh, self._untold = False, 0.0  # whether a plan was just adopted; seconds of its first proposal

    @property
    def plain(self) -> float:
        """Tokens per second of each row, expected of plain decoding; 0: not known yet."""
        return 1 / self.account.plain if self.account.plain else 0.0

    @property
    def followed(self) -> Choice:
        """The choice that is followed now: plain decoding, too, while that is probed."""
        probes = self.plan.plain and not self.choice.plan.plain
        return Choice(rate=self.plain, state=State.PROBING) if probes else self.choice

    @property
    def planned(self) -> PlannedProposal:
        """The plan of the next proposal, and what the full tier is to observe in it."""
        return PlannedProposal(self.plan, self._grain)

    def steer(self, prefix: SequenceState, live_B: Bools, left: Callable[[], int] = lambda: ENDLESS) -> PlannedProposal:
        """Plan the next proposal. Most calls return at once. left: tokens that are to come, at most."""
        if self._proposals == 0:
            self._begin(prefix.lengths_B[live_B].tolist(), left())
        if self._unlearnt[-1] >= self._together:
            self.conclude(prefix)
        due = self._cadence.elapsed >= self._cadence.due_at and self._proposals >= self._first_thought
        self._proposals += 1
        if self.ranks.broadcast(due or self._alarmed):
            self._think(prefix, live_B, left())
        if self.plan.plain and self.choice.plan.plain:
            self._plain_at = self._proposals
            self._grain = 0
        else:
            self._follow(prefix)
        return self.planned

    def observe(self, lengths: Sequence[int], taken: int, seconds: float) -> None:
        """Note a proposal: texts of these lengths took `taken` tokens in all, in so many seconds."""
        self._cadence.elapsed += seconds
        if self._fresh:  # caches are full of what another plan left there: it counts, and teaches no cost
            self._fresh = False
            self._untold = seconds
            for tier in self.tiers:
                tier.counters.new_passes()
        tokens, before, proposals = self._unlearnt
        self.lengths = lengths
        self._unlearnt = (tokens + taken / len(lengths), before + seconds, proposals + 1)

    def conclude(self, prefix: SequenceState) -> None:
        """Learn from the latest proposals, all of one plan, before the next one is of another kind, or rows leave."""
        (tokens, seconds, proposals), self._unlearnt = self._unlearnt, NOTHING
        if not proposals:
            return
        usual = self.beliefs.learn_passes(self.plan, self.lengths, seconds - self._untold)
        if self._untold:  # what is usual those behind it tell, or else some plain steps
            like = usual / (proposals - 1) if proposals > 1 else CONFIG.first_steps * self.account.plain
            usual = usual + min(self._untold, CONFIG.first_times * like)
            self._untold = 0.0
        if not self.account.plain and self.plan.plain:
            self.account.plain = usual / proposals
        # beyond them the machine did something else
        least = usual / CONFIG.outlier
        most = usual * CONFIG.outlier
        self.account.enter(tokens, min(max(seconds, least), most), self.plan.plain)
        self.beliefs.learn_verdicts(self.plan, prefix.lengths_B, proposals)

    def close(self, prefix: SequenceState) -> None:
        """Keep what was learnt for the next texts: these are done."""
        self.conclude(prefix)
        if self.lengths and self.beliefs.acceptance.kind(self.lengths) == self._kind:
            stays = "ngram" not in self.choice.plan.tiers and self.choice.state is not State.GUARDED
            left = self.choice if stays else Choice(rate=self.plain, state=State.PLAIN)
            self.costs.kinds[self._kind] = left, self.account, self._cadence

    def adopt(self, plan: Plan) -> None:
        """Plan by this from the next proposal on. Proposals that are not learnt from by now are dropped."""
        chosen = "retrieval" in plan.tiers and self.view.setting.budget.open
        self.plan = plan
        self.name = str(plan)
        self.budget = self.view.budget if chosen else None
        self._unlearnt = NOTHING
        self._fresh = self._proposals > 1
        drafted = prod(gamma for tier, gamma in zip(plan.tiers, plan.gammas, strict=False) if tier != "ngram")
        self._together = min(TOGETHER, REMEMBERED // drafted)  # whose passes counters remember

    def enter(self, lengths: Sequence[int], temperature: float) -> None:
        """Note that rows joined or left: these lengths there are now. What they showed is to be concluded before."""
        self.beliefs.acceptance.enter(temperature)
        if before := self.account.plain:  # else what rows of another number take would be won or lost
            self.account.plain = self.costs.passes.seconds(FULL, 1, len(lengths), sum(lengths))
            self.choice = replace(self.choice, rate=self.choice.rate * before / self.account.plain)

    @property
    def _alarmed(self) -> bool:
        """Whether the latest proposals have lost more than they may."""
        tokens, seconds, _ = self._unlearnt
        lost = seconds - tokens * self.account.plain
        return not self.plan.plain and lost > max(self.account.headroom, self.account.plain)

    def _begin(self, lengths: list[int], left: int) -> None:
        """Start from what the latest text of the kind has left. If much is to come, plans are weighed at once."""
        self._kind = self.beliefs.acceptance.kind(lengths)
        kept = self.ranks.broadcast(self.costs.kinds.get(self._kind))
        if kept:
            self.choice, account, cadence = kept
            self.account = account.next()
            self._cadence = cadence.next(account.won > 0, left * account.plain)
        elif not self.costs.passes.confirmed:
            self._first_thought = CONFIG.first_proposals
            self._cadence.due_at = CONFIG.first_seconds

    def _think(self, prefix: SequenceState, live_B: Bools, left: int) -> None:
        """Look for n-grams that repeat, and choose a plan if that is due."""
        began = self._clock()
        rows = live_B.nonzero()[0].tolist()
        self._listened += 1
        hits = self.beliefs.hindsight.update(prefix, rows[self._listened % len(rows)])
        rate = len(rows) * (self.choice.rate or self.plain)  # tokens per second of all rows
        self._cadence.heard(hits, self._clock() - began, STRIDE / rate if rate else 0.0)
        if cause := Cause.LOSS if self._alarmed else self._cadence.cause:
            self.conclude(prefix)
            self.account.losses += cause is Cause.LOSS and self.account.headroom < 0
            self.choice = replace(self.choose(prefix.lengths_B[live_B].tolist(), left), cause=cause)
            self._cadence.thought(self._clock() - began, self.choice.plan)
        self.choice = self.ranks.broadcast(self.choice)

    def choose(self, lengths: list[int], left: int) -> Choice:
        """The plan from now on, for texts of these lengths of which at most `left` tokens are to come."""
        sparse = any(length > self.view.budget(length) for length in lengths)
        budgets: list[BudgetFactors] = budget_options(self.view, lengths) if sparse else [()]
        self.estimates = self.beliefs.estimates(lengths, self.account.caution, budgets)
        self.account.plain = float(self.estimates.seconds_KW[FULL][0, 1])
        self.budget_factors = dict(budgets[0])
        headroom = self.account.headroom
        self.found = candidates(self.estimates, "draft" in self.by_name, sparse, budgets, left, headroom)
        return best(self.found, self.choice.plan)

    def _follow(self, prefix: SequenceState) -> None:
        """Adopt the chosen plan, or go on for a proposal until the full tier has observed attention for it.

        Where speculation promises little, some proposals are plain, so that the cost of plain decoding stays known.
        """
        chosen = self.choice.plan
        since = self._proposals - self._plain_at
        every = CONFIG.probe_every
        probing = since % every < CONFIG.probed and since >= every and self.choice.rate < 2 * self.plain
        wanted = PLAIN if self.ranks.broadcast(probing) else chosen
        ready = "retrieval" not in wanted.tiers or self._grain == self._retrieval_grain
        self._grain = self._retrieval_grain if "retrieval" in chosen.tiers else 0
        if ready and wanted != self.plan:
            self.conclude(prefix)
            self.adopt(wanted)


WIDE = 8  # tokens of the wide pass whose cost is told


def report(it: PlanController) -> PlanReport | None:
    """Return what it believed when it last weighed plans; None if it never did, or nothing was proposed."""
    if it.estimates is None or not it.lengths:
        return None
    beliefs = []
    for name, seconds_KW in it.estimates.seconds_KW.items():
        tier = name.split()[0]
        (narrow, wide) = (1000 * seconds_KW[0, [1, WIDE]]).tolist()
        longest = max(it.lengths)
        factor = it.budget_factors.get(longest.bit_length(), 1.0) if tier == "retrieval" else 1.0
        mean, deviation = (None, 0.0) if tier == FULL else it.beliefs.acceptance.of(tier, longest, factor)
        if tier in it.by_name:
            passes = it.costs.passes.of(name).count
            tokens = it.beliefs.acceptance.tokens(tier)
            beliefs.append(TierBelief(name, (narrow, wide), passes, mean, deviation, tokens))
    weighed = [WeighedPlan(str(each.plan), each.rate, each.score) for each in it.found]
    return PlanReport(beliefs, weighed, it.account.won, it.account.headroom)

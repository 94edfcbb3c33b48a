"""Configuration of the planner: the numbers that are chosen and not measured, with their units and reasons."""

from __future__ import annotations

from dataclasses import dataclass

FULL, AMONG_MODELS = "full", "full among models"
"""`FULL` names passes of the full tier in plain decoding or with n-grams. `AMONG_MODELS` names its passes between
passes of draft and retrieval tiers: these tiers leave other data in the processor's caches, so after short prompts the
full tier's passes take 1.5 times as long."""
READING = "draft reading"
"""Passes by which a draft reads a text, behind its first token."""


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Chosen numbers.

    To compare other values, change them and run `pytest tests/planner/test_regret.py -s`, which prints the regret.
    """

    # Guard: see `planner.controller`.
    allowed_loss: float = 0.015
    """Share of plain decoding's time that speculation may lose. With `credit_tokens` 64, a text of 64 tokens may lose
    3 %."""
    credit_tokens: float = 64.0
    """At its start a text may lose at most `allowed_loss` times the time that plain decoding takes for `credit_tokens`
    tokens. The number is small, because a short text has little to win. See also `TokensToCome.of`."""
    max_first_factor: float = 2.0
    """Of the seconds of a plan's first proposal, at most this many times the seconds of a later one count as expected
    (`PlanController.update_beliefs`): the first one may compile, which is no loss of the plan. The account records at
    most `outlier` times the expected seconds."""
    first_steps: float = 4.0
    """If a plan has made only one proposal, a later one is assumed to take the time of this number of steps of plain
    decoding."""
    caution: float = 1.0
    """Distance of the lower bound of acceptance from its mean, in standard deviations. Whenever a text loses more than
    the headroom, the bound moves down by this distance once more."""

    # Choice: see `planner.forecast`.
    optimism: float = 1.5
    """Distance of the upper bound of acceptance from its mean, in standard deviations. A score is the mean rate plus a
    part of the distance to the rate at this bound, so that plans are explored."""
    optimism_tokens: float = 128.0
    """Tokens still to come at which a score includes half of the distance from the mean rate to the rate at the upper
    bound. With fewer tokens it includes less, as a trial pays off in later tokens."""
    leave_gain: float = 1.15
    """Ratio of a plan's score to the rate of plain decoding at which plain decoding is left: costs are noisy."""
    switch_gain: float = 1.03
    """Ratio of scores at which other tiers replace the present ones: smaller differences are noise. For the choice
    among plans of one set of tiers, the mean rate of a plan that changes a budget is divided by it as well. Speculation
    goes on while the best score is at least `switch_gain` times the rate of plain decoding."""

    # Acceptance: see `planner.cost_model`.
    prior_tokens: float = 8.0
    """Weight of the prior acceptance of a tier, in draft tokens."""
    history_tokens: float = 24.0
    """Largest weight of earlier texts in the acceptance of a new one, in draft tokens. Texts of one kind differ in
    acceptance about as much as samples of this number of tokens."""
    history_limit: float = 400.0
    """Draft tokens that are kept of a case at most, so that later ones count more."""
    text_memory: float = 100.0
    """Proposals over which observations of a text fade. So a failed tier is tried again, as the text may change."""
    history_memory: float = 1000.0
    """Proposals over which observations of earlier texts fade. So a tier with bad luck is tried again."""
    budget_tokens: float = 32.0
    """Largest weight, in draft tokens, of the default budget's acceptance as the prior of another budget."""
    budget_exponent: float = 0.3
    """Rejections are assumed proportional to the budget to the power of -`budget_exponent`: see
    docs/results/acceptance.md."""

    budget_gain: float = 1.04
    """For the choice among plans of one set of tiers, the mean rate of a plan is divided by this once for each size of
    rows whose budget is not the default one: the estimate of such a gain is uncertain."""

    # Cadence: see `planner.controller`.
    replan_ratio: float = 200.0
    """Seconds of decoding per second of planning. Planning also evicts the model from the processor's caches."""
    scan_ratio: float = 100.0
    """Seconds of decoding per second of scanning for n-grams."""
    backoff_step: float = 0.5
    """Increment of the backoff by each replanning. The backoff multiplies the wait until plans are weighed and, above
    1, the wait until the next scan."""
    max_backoff: float = 4.0
    """Largest backoff while plain decoding stays best; else it is 1. It is finite, as a text may change."""
    replan_hits: int = 8
    """Tokens predicted by n-grams at which plans are weighed at once; a backoff above 1 multiplies the number."""
    probe_every: int = 64
    """Proposals after which plain decoding is probed, where speculation promises less than twice its rate."""
    probe_proposals: int = 3
    """Proposals of a probe: the first one finds the weights of other models in the caches."""
    first_proposals: int = 8
    """Least number of proposals of plain decoding at the start of a process. Plans are first weighed when this number
    and `first_seconds` are both reached."""
    first_seconds: float = 0.02
    """Seconds of plain decoding at the start of a process, in which processors and caches warm up."""

    # Costs: see `planner.pass_costs`.
    pass_memory: float = 64.0
    """Passes of a kind over which old seconds fade."""
    unseen_gain: float = 0.1
    """Optimism for passes of a kind that never ran: their expected seconds are reduced by about this share if the
    nearest kind that ran is an octave or more away, in width, rows and keys together; by less if it is nearer."""
    slowdown_step: float = 1.25
    """Ratio of measured to expected seconds, either way, at which `PassCosts.slowdown` changes, if all tiers agree."""
    outlier: float = 1.5
    """Ratio of measured to expected seconds, either way, beyond which a pass counts as an outlier."""


CONFIG = PlannerConfig()

"""Configuration of the planner: the numbers that are chosen and not measured, with their units and reasons."""

from __future__ import annotations

from dataclasses import dataclass

FULL, AMONG_MODELS = "full", "full among models"
"""Names of the full tier: alone or with n-grams, and between passes of other models. Those leave their own weights in
the processor's caches, which makes the passes of the full tier half as long again behind short prompts."""


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Chosen numbers. `tests/planner/test_regret.py` prints the regret of other values."""

    # Guard: see `planner.controller`.
    allowed_loss: float = 0.015
    """Share of plain decoding's time that trials may lose: with noise, texts of 64 tokens keep .97 of the speed."""
    credit_tokens: float = 64.0
    """Tokens of plain decoding whose `allowed_loss` a text may lose at its start: shorter texts have less to win."""
    max_first_factor: float = 2.0
    """Most that the first proposal of a plan counts, in later ones: it may compile, or be interrupted."""
    first_steps: float = 4.0
    """Steps of plain decoding that stand for the later ones, where the plan made only its first proposal."""
    caution: float = 1.0
    """Standard deviations below the mean at which a plan counts as no risk. Each loss in a text adds as many."""

    # Choice: see `planner.forecast`.
    optimism: float = 1.5
    """Standard deviations of the upper bound above the mean, by which plans are compared: it makes them explore."""
    optimism_tokens: float = 128.0
    """Tokens still to come at which half of `optimism` counts: a trial pays by the tokens that come after it."""
    leave_gain: float = 1.15
    """Ratio of a plan's score to the rate of plain decoding at which plain decoding is left: costs are noisy."""
    switch_gain: float = 1.03
    """Ratio of a score to that of the present tiers or budgets at which they change: less is noise, and a change has a
    cost, as attention has to be observed first."""

    # Acceptance: see `planner.cost_model`.
    prior_tokens: float = 8.0
    """Draft tokens as which the prior acceptance of a tier counts."""
    history_tokens: float = 24.0
    """Draft tokens as which earlier texts count in a new one: texts of one kind differ by about that much."""
    history_limit: float = 400.0
    """Draft tokens of earlier texts that are kept at most, so that later ones count more."""
    text_memory: float = 100.0
    """Proposals over which observations of a text fade: it may change, so that a tier that failed is tried again."""
    history_memory: float = 1000.0
    """Proposals over which observations of earlier texts fade: a tier with bad luck is tried again."""
    budget_tokens: float = 32.0
    """Draft tokens as which the acceptance with the usual budget counts for another budget."""
    budget_exponent: float = 0.3
    """Rejections go with the budget to the power of minus this (docs/results/acceptance.md)."""

    budget_gain: float = 1.04
    """Ratio of rates at which another budget replaces the usual one: the estimate of such a gain is uncertain."""

    # Cadence: see `planner.controller`.
    replan_ratio: float = 200.0
    """Seconds of decoding per second of planning. Planning also evicts the model from the processor's caches."""
    scan_ratio: float = 100.0
    """Seconds of decoding per second of scanning for n-grams."""
    backoff_step: float = 0.5
    """Added by each planning to the backoff, which multiplies both waits."""
    max_backoff: float = 4.0
    """Largest backoff while plain decoding stays best; else it is 1. It is finite, as a text may change."""
    replan_hits: int = 8
    """Tokens predicted by n-grams that cause a new plan at once, times the backoff where that is above 1."""
    probe_every: int = 64
    """Proposals after which plain decoding is probed, where speculation promises less than twice its rate."""
    probe_proposals: int = 3
    """Proposals of a probe: the first one finds the weights of other models in the caches."""
    first_proposals: int = 8
    """Proposals of plain decoding at the start of a process."""
    first_seconds: float = 0.02
    """Seconds of plain decoding at the start of a process, in which processors and caches warm up."""

    # Costs: see `planner.pass_costs`.
    pass_memory: float = 64.0
    """Passes of a kind over which old seconds fade."""
    unseen_gain: float = 0.1
    """Optimism for a pass of twice the nearest width that ran: the share by which its expected seconds are reduced."""
    changed_speed: float = 1.25
    """Ratio of measured to expected seconds, either way, at which the machine's speed changes, if all tiers agree."""
    outlier: float = 1.5
    """Ratio of measured to expected seconds, either way, beyond which a pass counts as an outlier."""


CONFIG = PlannerConfig()

"""Configuration of the planner: numbers by which plans are judged and that nothing measured gives, with reasons."""

from __future__ import annotations

from dataclasses import dataclass

FULL, AMONG_MODELS = "full", "full among models"
"""The full tier alone or with n-grams, and between passes of other models, which leave the processor's caches full of
other weights: behind short prompts that makes its passes half as long again."""


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Numbers that somebody chose. The regret of others is printed by `tests/planner/test_regret.py`."""

    # Guard: see `planner.controller`.
    allowed_loss: float = 0.015
    """Share of plain decoding's time that trials may lose: texts of 64 tokens keep .97 of it with their noise."""
    credit_tokens: float = 64.0
    """Tokens of plain decoding whose `allowed_loss` a text may lose at its start: shorter texts have less to win."""
    first_times: float = 2.0
    """Times as long as others that the first proposal of a plan counts at most: it may compile, or be interrupted."""
    first_steps: float = 4.0
    """Steps of plain decoding that it is taken for where no other one of the plan came behind it."""
    caution: float = 1.0
    """Standard deviations below the mean at which a plan counts as no risk; each loss in a text adds as many."""

    # Choice: see `planner.forecast`.
    optimism: float = 1.5
    """Standard deviations above the mean by which plans are compared, so that what is seldom seen is tried."""
    optimism_tokens: float = 128.0
    """Tokens left of a text at which half of `optimism` counts: a trial pays by the tokens that come after it."""
    leave_gain: float = 1.15
    """Times the rate of plain decoding that a plan promises, for that to be left: costs of passes are noisy."""
    switch_gain: float = 1.03
    """Times the rate of the current tiers or budgets that others promise: less is noise, and a change costs a look."""

    # Acceptance: see `planner.cost_model`.
    prior_tokens: float = 8.0
    """Draft tokens that the acceptance of a tier which was never seen counts as."""
    history_tokens: float = 24.0
    """Draft tokens that earlier texts count as in a new one: texts of one kind differ by about so much."""
    history_limit: float = 400.0
    """Draft tokens of earlier texts that are remembered: later ones count more."""
    text_memory: float = 100.0
    """Proposals over which a text forgets: it may change, and what failed is tried."""
    history_memory: float = 1000.0
    """Proposals over which a history forgets: a tier that was unlucky is tried again some time."""
    budget_tokens: float = 32.0
    """Draft tokens that the usual budget's acceptance counts as for another budget."""
    budget_exponent: float = 0.3
    """Rejections go with the budget to the power of minus this (docs/results/acceptance.md)."""

    budget_gain: float = 1.04
    """Times the rate with the usual budget that another one promises: of such a gain little is known."""

    # Cadence: see `planner.controller`.
    think_ratio: float = 200.0
    """Seconds of decoding for a second of weighing plans; the caches that this empties come on top."""
    listen_ratio: float = 100.0
    """The same for a second of looking for n-grams."""
    patience_step: float = 0.5
    """What is added to the patience by which both are multiplied, each time that plans are weighed."""
    most_patience: float = 4.0
    """The largest patience where plain decoding stays best; else it is 1: a text may change, and is looked at again."""
    heard_tokens: int = 8
    """Tokens that n-grams predict until plans are weighed at once, times the patience."""
    probe_every: int = 64
    """Proposals of which some are plain decoding where speculation promises less than twice its rate."""
    probed: int = 3
    """How many: the first one finds what other models left in the caches."""
    first_proposals: int = 8
    """Proposals of plain decoding where this process has seen none."""
    first_seconds: float = 0.02
    """Seconds of plain decoding where this process has seen none: in the first ones processors and caches warm up."""

    # Costs: see `planner.pass_costs`.
    pass_memory: float = 64.0
    """Passes of a kind over which their cost forgets."""
    unseen_gain: float = 0.1
    """Part of the seconds that a pass of twice the nearest width that ran is thought to take less."""
    changed_speed: float = 1.25
    """Times the expected seconds at which a machine is taken to have changed its speed, if most passes say so."""
    outlier: float = 1.5
    """Times the expected seconds that a pass may take, either way, before it is taken for an accident."""


CONFIG = PlannerConfig()

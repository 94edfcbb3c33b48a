"""Account of what speculation won or lost in a text, in seconds, so that trials never cost more than was allowed.

A conservative bandit (Wu et al. 2016, arXiv 1602.04282): a plan may be followed if the account stays above its floor
even where the plan does as badly as may be feared. The floor is a small share of the time that plain decoding takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from triforce.planner.planner_config import CONFIG

LEAST_TRUST, REGAINED = 1 / 8, 1.1


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

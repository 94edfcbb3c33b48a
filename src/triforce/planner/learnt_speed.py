"""Speed of the best plan over plain decoding, by passes and acceptance that earlier texts taught, kept in a profile.

A plan is weighed as mode `auto` weighs it (see `plan`), at the means of what is believed, and without n-grams: what
these gain depends on the text. A draft counts once enough of its tokens were verified, the retrieval tier always.
"""

from __future__ import annotations

import numpy as np

from triforce.planner.acceptance import PRIOR_ACCEPTANCE
from triforce.planner.cost_model import CostModel
from triforce.planner.forecast import WIDEST
from triforce.planner.pass_costs import AMONG_MODELS, FULL
from triforce.planner.plan import NGRAM_GAMMAS, Estimates, NgramOdds, plan_space, proposals

ACCEPTANCE = 0.92
"""Share of guesses through some thousand selected tokens that the whole context keeps, on long real texts."""
SUPPOSED = {"retrieval": ACCEPTANCE, "draft": PRIOR_ACCEPTANCE["draft"]}
"""Acceptance of tiers before any was seen."""
ENOUGH = 64.0
"""Verified tokens of a tier by which its acceptance is known: of less, one text is most."""
BANDS = (0, 1, 2)
"""Bands of temperature whose acceptance counts: greedy texts, and those up to a temperature of .9."""
_SHARE_A, _AMOUNT_AG = np.zeros(2), np.zeros((2, max(NGRAM_GAMMAS) + 1))
NO_NGRAMS = NgramOdds(_SHARE_A, _AMOUNT_AG, _AMOUNT_AG, _SHARE_A, _AMOUNT_AG, _AMOUNT_AG)
"""Odds of a text in which nothing stood before."""


class LearntSpeed:
    """Speed by a cost model, of a text of its own. budget: tokens that the retrieval tier reads."""

    def __init__(self, costs: CostModel, budget: int) -> None:
        self._passes, self._budget = costs.passes, budget
        found = {tier: costs.acceptance.pooled(tier, BANDS, prior) for tier, prior in SUPPOSED.items()}
        self._seen = {tier: mean for tier, (mean, tokens) in found.items() if tokens >= ENOUGH}

    @property
    def known(self) -> bool:
        """Whether verifications ran: passes of a single token say nothing of wider ones."""
        return any(kind[0] > 1 for tier in (FULL, AMONG_MODELS) for kind in self._passes.of(tier).seen)

    def speedup(self, length: int) -> float:
        """Return the tokens per second of the best plan over plain decoding's, at so many tokens of context."""
        keys = {FULL: length, AMONG_MODELS: length, "retrieval": min(self._budget, length), "draft": 0, "ngram": 0}
        seconds_KW = {tier: self._passes.table(tier, 1, [count], WIDEST) for tier, count in keys.items()}
        accepted = SUPPOSED | self._seen | {"ngram": 1.0}
        accepted_KZ = {tier: np.array([[share]]) for tier, share in accepted.items()}
        space = plan_space("draft" in self._seen, length > self._budget)
        tokens_KZN, seconds_KZN = proposals(space, Estimates(1, seconds_KW, accepted_KZ, NO_NGRAMS))
        return float((tokens_KZN / seconds_KZN).max() * seconds_KW[FULL][0, 1])

    @property
    def basis(self) -> str:
        """Evidence for that in words: how many kinds of passes, and shares of draft tokens that were accepted."""
        kinds = sum(len(costs.seen) for costs in self._passes.tiers.values())
        shares = [f"{share:.0%} of the {tier} tier's accepted" for tier, share in self._seen.items()]
        if "retrieval" not in self._seen:
            shares.append(f"{ACCEPTANCE:.0%} of the retrieval tier's supposed to be")
        passes = f"{kinds} kinds of passes of earlier texts on this machine, with whatever else ran meanwhile"
        return f"{passes}, and of draft tokens {', '.join(shares)}"

"""Stacks of tiers with enumerable laws: of every depth and all logits settings, and the law that each must have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log

from torch import Tensor

from tests.helpers.laws.enumeration import PLAIN, Law, TierStack, chain_law, distance, law
from tests.helpers.laws.palette import Weights, cells_of, logits_of, mixed, shuffled, table
from triforce.interface.sampling_params import SamplingParams
from triforce.speculation import verification as couplings

EXACT = 1e-10
HALVES = shuffled((1, 1, 0)) * 4 + shuffled((1, 0, 0))
PAIRS = shuffled((1, 1, 0))
QUARTERS = [(1, 1, 1, 1), *shuffled((1, 1, 0, 0)), *shuffled((1, 0, 0, 0))]
THIRDS = shuffled((1, 1, 1), (2, 1, 0), (1, 0, 0))
COINS = shuffled((1, 1), (2, 1), (1, 0))


@dataclass(frozen=True)
class Case:
    """A stack by its gammas from the lowest tier to the one below the top. `ngram`: the level without a model."""

    name: str
    gammas: tuple[int, ...]
    horizon: int = 7
    palette: list[Weights] | None = None
    order: int = 2
    params: SamplingParams = PLAIN
    lookup: int | None = None
    selects: bool = False
    stop: frozenset[int] = frozenset()
    slow: bool = False
    seed: int = 1
    block: bool = False

    @property
    def laws(self) -> list[Weights]:
        return self.palette or HALVES

    @property
    def models(self) -> int:
        return len(self.gammas) + 1 - (self.lookup is not None)

    def tables(self) -> list[Tensor]:
        """Return the warped laws of the tiers with a model, from the lowest to the top; many equal the top tier's."""
        orders = [self.order + (self.selects and level == 0) for level in range(self.models)]
        drawn_tables = [table(self.laws, order, seed) for seed, order in enumerate(orders, self.seed)]
        return [
            *(mixed(laws, drawn_tables[-1], seed) for seed, laws in enumerate(drawn_tables[:-1], self.seed)),
            drawn_tables[-1],
        ]

    def stack(self, tables: list[Tensor] | None = None) -> TierStack:
        """Return the tiers, by default those of `tables()`, or with given logits."""
        logits: list[Tensor | None] = [*(tables or (logits_of(laws, self.params) for laws in self.tables()))]
        if self.lookup is not None:
            logits.insert(self.lookup, None)
        tiers = list(zip(logits, [*self.gammas, 1], strict=True))
        reached = COINS if self.params.presence_penalty else self.laws
        cells = cells_of(reached, reached, sum(self.gammas) if self.block else 0)
        coupling = couplings.BlockRejection if self.block else couplings.Rejection
        return TierStack(tiers, cells, self.params, selects=self.selects, coupling=coupling)

    def truth(self) -> Law:
        """Return the law of the top tier's chain on its own."""
        top = self.tables()[-1]
        prompt = TierStack.prompt

        def next_law(text: tuple[int, ...]) -> list[float]:
            presence_factor = exp(self.params.presence_penalty)
            weights = [
                p if v in text else p * presence_factor
                for v, p in enumerate(top[(*prompt, *text)[-self.order :]].tolist())
            ]
            return [w / sum(weights) for w in weights]

        return chain_law(next_law, self.horizon, self.stop)

    def error(self, **changes: object) -> float:
        """Return the distance of the text's law from the truth."""
        return distance(law(replace(self.stack(), **changes), self.horizon, self.stop), self.truth())


PENALTY = SamplingParams(presence_penalty=log(2))
COLD = SamplingParams(temperature=0.5)
HOT = SamplingParams(temperature=2)
CASES = [
    Case("plain decoding", ()),
    Case("two tiers, gamma 1", (1,), 8),
    Case("two tiers, gamma 3", (3,)),
    Case("two tiers, thirds", (1,), 6, THIRDS, order=1),
    Case("two tiers, a coin", (1,), 6, COINS, order=1),
    Case("two tiers, quarters", (1,), 6, QUARTERS, order=1),
    Case("three tiers, gamma 1 and 1", (1, 1), 8),
    Case("three tiers, gamma 1 and 2", (1, 2), 6),
    Case("three tiers, gamma 2 and 2", (2, 2), 4),
    Case("three tiers, gamma 1 and 3", (1, 3), 5),
    Case("three tiers, thirds", (1, 1), 3, THIRDS, order=1),
    Case("four tiers", (1, 1, 1), 6),
    Case("ngram", (2,), lookup=0),
    Case("ngram in three tiers", (2, 2), lookup=0),
    Case("ngram above a draft", (1, 2), lookup=1),
    Case("ngram above a draft in three tiers", (1, 2, 2), 5, lookup=1),
    Case("a stop token inside drafts", (3,), stop=frozenset({0})),
    Case("a stop token inside drafts of three tiers", (1, 2), stop=frozenset({1})),
    Case("a stop token inside ngram", (3,), stop=frozenset({1}), lookup=0),
    Case("a draft that looks where the top tier looked", (2,), selects=True),
    Case("a deep draft that looks where the top tier looked", (1, 2), 5, selects=True),
    Case("greedy", (2, 2), params=SamplingParams(temperature=0), palette=shuffled((1, 0, 0))),
    Case("low temperature", (1, 2), params=COLD),
    Case("high temperature", (1,), 5, THIRDS, order=1, params=HOT),
    Case("logit bias", (2,), params=SamplingParams(logit_bias={0: 2.0, 2: -1.0})),
    Case(
        "presence penalty",
        (1,),
        5,
        shuffled((1, 1)) * 6 + shuffled((1, 0)),
        params=PENALTY,
    ),
    Case("top-k", (2,), palette=PAIRS, params=SamplingParams(top_k=2)),
    Case("top-p", (1, 2), params=SamplingParams(top_p=0.8)),
    Case("min-p", (2,), params=SamplingParams(min_p=0.3)),
    Case("all together", (2,), palette=PAIRS, params=SamplingParams(1.5, 2, 0.9, 0.1, logit_bias={1: 3.0})),
    Case("three tiers, gamma 2 and 2, five tokens", (2, 2), 5, slow=True),
    Case("four tiers, gamma 1, 2 and 1", (1, 2, 1), 6, slow=True),
    Case("four tiers, gamma 1, 1 and 2", (1, 1, 2), 3, slow=True),
    Case("two tiers, a coin, gamma 2", (2,), 3, COINS, order=1, slow=True),
    Case("two tiers, quarters, gamma 2", (2,), 3, QUARTERS, order=1, slow=True),
]
BLOCKS = [
    Case("a block: plain decoding", (), block=True),
    Case("a block: gamma 1", (1,), block=True),
    Case("a block: gamma 2", (2,), 5, block=True),
    Case("a block: gamma 3", (3,), 4, block=True),
    Case("a block: thirds", (2,), 3, THIRDS, order=1, block=True),
    Case("a block: a stop token", (2,), 5, stop=frozenset({0}), block=True),
    Case("a block: ngram", (3,), 6, lookup=0, block=True),
    Case("a block: ngram in three tiers", (2, 1), 4, lookup=0, block=True),
    Case("a block: ngram above a draft", (1, 2), 5, lookup=1, block=True),
    Case("a block: three tiers", (1, 1), 5, block=True),
    Case("a block: three tiers, gamma 2 and 1", (2, 1), 3, block=True),
    Case("a block: a draft that looks where the top tier looked", (2,), 4, selects=True, block=True),
    Case("a block: penalties", (2,), 3, shuffled((1, 1)) * 6 + shuffled((1, 0)), params=PENALTY, block=True),
    Case("a block: three tiers, gamma 1 and 2", (1, 2), 4, slow=True, block=True),
    Case("a block: four tiers", (1, 1, 1), 3, slow=True, block=True),
]
"""Cases of the `block` coupling."""
BY_NAME = {case.name: case for case in CASES + BLOCKS}

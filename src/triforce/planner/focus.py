"""In which layers a retrieval tier searches the whole context: found by trying, on the last tokens of a prompt.

In most layers attention moves slowly, and what the last verification looked at serves the next tokens. Where heads look
things up, every token asks for other places (retrieval heads, Wu et al. 2024), and a budget hides them: such a layer is
worth a search in every pass (`kernels.Search`), and the others need less. Nothing here can change a text.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from triforce.cache import Full, Retrieval
from triforce.cache.full import TAIL
from triforce.planner.plan import WIDE, expected
from triforce.shapes import Ints, ints
from triforce.speculation import Prefix, Proposer, Tier

PART, SPAN, SPANS = 2, 8, 6  # tokens of a guesser's pass, of what is guessed before it is verified; how often
BETTER = 1.05  # times the worth without a layer: less is not worth reading it
MOST = 4  # layers
DRAFTED = 1.8  # tokens that a pass of a tier with another one below it gives, roughly
PASS = 8e6  # numbers that could be read in what a pass takes besides

Layers = frozenset[int]


class Focus:
    """Remembers what was found, with a tier below or without, for each size of context. `seeded`: the coupling."""

    def __init__(self, seeded: bool) -> None:
        self.seeded = seeded
        self._found: dict[tuple[int, bool], Layers] = {}

    @torch.no_grad()
    def apply(self, tiers: Sequence[Proposer], prefix: Prefix) -> None:
        """Let the retrieval tier of a ladder whose prompts have been read, if it has one, see what it must."""
        tier = next((tier for tier in tiers if isinstance(tier, Tier) and tier.name == "retrieval"), None)
        if tier is None:
            return
        view: Retrieval = tier.cache
        row = int(view.full.lengths_B.argmax())
        length = int(view.full.lengths_B[row])
        if length < 2 * view.setting.budget.of(length) or length < SPAN * SPANS + TAIL:
            return
        offloaded = view.full.pool.offloaded
        most = min(MOST, offloaded.whole_layers) if offloaded else MOST  # others would be read from their store
        case = length.bit_length(), tier.below is not None
        if case not in self._found:
            self._found[case] = _Trial(tier, tiers[-1], prefix.select([row]).ids_BS, row).best(self.seeded, most)
        view.searched_layers = self._found[case]
        if offloaded:
            offloaded.prefer(view.searched_layers)


class _Trial:
    """The end of row `row`'s prompt, read again through the retrieval tier and then, as it was, by the exact one."""

    def __init__(self, tier: Tier[Retrieval], top: Any, ids_1S: Ints, row: int) -> None:
        self.tier, self.top, self.ids_1S = tier, top, ids_1S
        self.exact: Full = top.cache.row(row)
        self.length = int(self.exact.lengths_B[0])

    def best(self, seeded: bool, most: int) -> Layers:
        """Greedily, the layers that promise most tokens a second, so many at most."""
        best: Layers = frozenset()
        layers = range(self.exact.pool.config.layers)
        worth, candidates = 0.0, [best, *(frozenset({layer}) for layer in layers)]
        while len(best) < min(most, len(layers) - 1):
            worths = {tried: self._rate(share, len(tried), seeded) for tried, share in self.shares(candidates).items()}
            found = max(worths, key=worths.__getitem__)
            if worths[found] < BETTER * (worth or worths[best]):
                break
            best, worth = found, worths[found]
            candidates = [best | {layer} for layer in layers if layer not in best]
        return best

    def shares(self, candidates: Iterable[Layers]) -> dict[Layers, float]:
        """The share of guesses that `rejection` would keep, at temperature 1, if a guesser searched these layers."""
        view, first = self.tier.cache, self.length - SPAN * SPANS
        self.exact.rewind(ints([first - TAIL]))
        self._read(self.top.model, self.exact, TAIL)
        views = {layers: Retrieval(self.exact, type(view.policies[0]), view.setting) for layers in candidates}
        for layers, lower in views.items():
            lower.searched_layers = layers
        kept = dict.fromkeys(views, 0.0)
        for start in range(first, self.length, SPAN):
            guessed = {}
            for layers, lower in views.items():
                parts = [self._read(self.tier.model, lower, PART) for _ in range(SPAN // PART)]
                guessed[layers] = torch.cat(parts)
                lower.rewind(ints([start]))
            exact_TV = self._read(self.top.model, self.exact, SPAN)
            for layers, guessed_TV in guessed.items():
                kept[layers] += float(torch.minimum(exact_TV, guessed_TV).sum())
        return {layers: sum_ / (SPAN * SPANS) for layers, sum_ in kept.items()}

    def _read(self, model: Any, view: Any, count: int) -> Tensor:
        """The laws behind the next tokens, (T, V)."""
        start, count_1 = int(view.lengths_B[0]), ints([count])
        view.begin(count_1, count)
        logits_1TV: Tensor = model(torch.from_numpy(self.ids_1S[:, start : start + count]), view)
        view.advance(count_1)
        return logits_1TV[0].softmax(-1)

    def _rate(self, share: float, searched: int, seeded: bool) -> float:
        """Tokens for each number that is read, at the best gamma.

        `seeded` keeps at least a share of (1 - d) / (1 + d) where `rejection` keeps 1 - d (Daliri et al. 2024). Numbers
        and not seconds, so that the same prompt and seed give the same text under `rejection`, too.
        """
        config, guesses = self.exact.pool.config, DRAFTED if self.tier.below else 1.0
        share = share / (2 - share) if seeded else share
        lower = PASS + config.weights_read + config.kv_size * self.tier.cache.keys(self.length, searched)
        full = PASS + config.weights_read + config.kv_size * self.length
        return max(float(expected(share, gamma)) / (gamma / guesses * lower + full) for gamma in WIDE)

"""Layers in which a retrieval tier searches the whole context: found on the way, in passes that are made anyway.

In most layers attention moves slowly, and what the last verification looked at serves the next tokens. Where heads look
things up, every token asks for other places (retrieval heads, Wu et al. 2024, arXiv 2404.15574), and a budget hides
them: such a layer is worth a search in every pass (`kernels.Search`), and the others need less.

A verification shows how much attention of each layer fell outside of the selection. Where refusals cost enough that
less of them would pay, the layer that missed most is searched in every other few proposals, until the guesses kept
with it and without it tell which is better. No pass is made for it, and nothing here can change a text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from triforce.distributed.group import ALONE, TPGroup
from triforce.kvcache import RetrievalView
from triforce.planner.plan import WIDE, expected
from triforce.speculation import Tier

PROMISED = (
    1.12  # times the worth without a layer, if refusals went with the square of what is missed: else none is tried
)
BETTER = 1.05  # times the worth without a layer: less is not worth reading it
MOST = 4  # layers
VAIN = 3  # layers tried in vain, after which no other one is
JUDGED = 24  # guesses that say something: whether fewer refusals would pay, and what came of a layer
TRIED = 256  # guesses with a layer after which it is judged in any case
BLOCK = 4  # proposals with the layer or without it, whatever was seen less
LEFT = 16  # tokens that a text has still to come, or no layer is tried in it: the first look at all keys takes a while
DRAFTED = 1.8  # tokens that a pass of a tier with another one below it gives, roughly
PASS = 8e6  # numbers that could be read in what a pass takes besides


@dataclass(slots=True)
class Guesses:
    """Guesses of the retrieval tier that were kept, and refused."""

    kept: int = 0
    refused: int = 0

    @staticmethod
    def read(saved: Any) -> Guesses:
        """See `Finding.read`."""
        return Guesses(_count(saved["kept"]), _count(saved["refused"]))

    @property
    def count(self) -> int:
        return self.kept + self.refused

    @property
    def refusal(self) -> float:
        """The share refused, of a few more than there were."""
        return (self.refused + 0.5) / (self.count + 1)

    @property
    def error(self) -> float:
        """The standard error of that."""
        return float((self.refusal * (1 - self.refusal) / (self.count + 1)) ** 0.5)


@dataclass(slots=True)
class Trial:
    """One layer more: what came of guesses without it, and with it."""

    layer: int
    without: Guesses = field(default_factory=Guesses)
    searching: Guesses = field(default_factory=Guesses)


@dataclass(slots=True)
class Finding:
    """In texts of some size: the layers to search, those that were tried in vain, and the one that is being tried.

    guesses: what came of some since layers were last considered.
    """

    layers: list[int] = field(default_factory=list)
    vain: list[int] = field(default_factory=list)
    trial: Trial | None = None
    guesses: Guesses = field(default_factory=Guesses)

    @staticmethod
    def read(saved: Any) -> Finding:
        """From `asdict` by way of JSON, which anybody may have written. Raises ValueError, TypeError or KeyError."""
        layers, vain = ([_count(layer) for layer in saved[name]] for name in ("layers", "vain"))
        found, trial = Finding(layers, vain, guesses=Guesses.read(saved["guesses"])), saved["trial"]
        if trial is not None:
            without, searching = (Guesses.read(trial[name]) for name in ("without", "searching"))
            found.trial = Trial(_count(trial["layer"]), without, searching)
        return found


Findings = dict[str, Finding]
"""By size of context, and how much is read of it."""


def _count(number: Any) -> int:
    if not isinstance(number, int) or number < 0:
        raise ValueError("neither a layer nor a count")
    return number


class SearchedLayers:
    """Of one batch, whose retrieval tier is `tier`.

    findings: what is known, by circumstances; it is added to. Of several `ranks` all follow rank 0, as each sees the
    attention of its own heads.
    """

    def __init__(self, tier: Tier[RetrievalView], findings: Findings, ranks: TPGroup = ALONE) -> None:
        self.tier, self.findings, self._ranks = tier, findings, ranks
        self._bits, self._found = 0, Finding()
        self._length = self._left = self._turns = 0
        self._before, self._searching = (0, 0), False
        self.trying = False
        """Whether one of the layers whose turn it is is only tried."""
        self.news = False
        """Whether something was seen that is worth keeping."""

    def turn(self, length: int, left: int) -> frozenset[int]:
        """The layers to search in the next proposal.

        The longest of the texts has so many tokens, and one of them may go on for `left` more.
        """
        if length.bit_length() != self._bits:
            self._enter(length.bit_length())
        self._length, self._left, self._before = length, left, self._judged()
        trial = self._found.trial
        if trial and self._turns % BLOCK == 0:
            self._searching = trial.searching.count <= trial.without.count
        self.trying = trial is not None and left >= LEFT and self._searching
        return frozenset(self._found.layers + ([trial.layer] if trial and self.trying else []))

    def learn(self) -> None:
        """After that proposal."""
        kept, refused = (now - before for now, before in zip(self._judged(), self._before, strict=True))
        sees_much = self._length < 2 * self.tier.cache.budget(self._length)
        if kept + refused == 0 or sees_much:  # or others guessed
            return
        trial = self._found.trial
        guesses = self._found.guesses if trial is None else trial.searching if self.trying else trial.without
        guesses.kept, guesses.refused = guesses.kept + kept, guesses.refused + refused
        if trial:
            self._turns, self.news = self._turns + 1, True
            self._conclude(trial)
        elif guesses.count >= JUDGED:
            self._consider(guesses)
            self._found.guesses = Guesses()

    def _enter(self, bits: int) -> None:
        """Texts have come to a length of so many bits."""
        self._bits, self._turns = bits, 0
        found = self.findings.get(self._case(bits))
        if found is None:  # what pays in shorter ones pays here
            shorter = self.findings.get(self._case(bits - 1), Finding())
            found = Finding([*shorter.layers], [*shorter.vain])
        self._found = self.findings[self._case(bits)] = self._ranks.agree(found)
        layers = self.tier.cache.full.pool.config.layers
        self._found.layers = [layer for layer in self._found.layers if layer < layers]
        self._prefer(self._found)

    def _case(self, bits: int) -> str:
        setting = self.tier.cache.setting
        return f"{bits} {setting.budget.tokens or setting.budget.share} {setting.chunk}"

    def _judged(self) -> tuple[int, int]:
        counters = self.tier.counters
        return int(counters.accepted_B.sum()), int(counters.refused_B.sum())

    def _consider(self, guesses: Guesses) -> None:
        """Begin a trial, if the layer that misses most promises enough."""
        found, vain = self._found.layers, self._found.vain
        view, config = self.tier.cache, self.tier.cache.full.pool.config
        offloaded = view.full.pool.offloaded
        most = min(MOST, offloaded.whole_layers) if offloaded else MOST  # others would be read from their store
        refusal = guesses.refused / guesses.count
        enough = len(found) >= min(most, config.layers - 1) or len(vain) >= VAIN
        if enough or self._gain(refusal, 0.0) < PROMISED:
            return
        missed = self._ranks.agree(self._missed())
        candidates = [layer for layer in range(config.layers) if missed and layer not in (*found, *vain)]
        if not candidates:
            return
        layer = max(candidates, key=missed.__getitem__)
        left_out = sum(missed[each] ** 2 for each in candidates)
        promised = refusal * (1 - missed[layer] ** 2 / max(left_out, 1e-9))
        if self._gain(refusal, promised) >= PROMISED and self._saves(refusal, promised):
            self._found.trial, self._turns = Trial(layer), 0
            self._prefer(self._found)

    def _missed(self) -> list[float]:
        """By layer, the share of attention outside of the selections, in the mean of the rows that have some."""
        view = self.tier.cache
        some = [missed_L for b in range(len(view.selections)) if (missed_L := view.missed(b)) is not None]
        return [sum(each) / len(some) for each in zip(*some, strict=True)]

    def _conclude(self, trial: Trial) -> None:
        """End a trial that has told enough."""
        without, searching = trial.without, trial.searching
        if min(without.count, searching.count) < JUDGED:
            return
        error = 2 * (without.error**2 + searching.error**2) ** 0.5
        best, pays, worst = (self._gain(without.refusal, searching.refusal + by) for by in (-error, 0.0, error))
        well = pays >= BETTER and (worst >= 1 or searching.count >= TRIED)
        if well or best < BETTER or searching.count >= TRIED:
            (self._found.layers if well else self._found.vain).append(trial.layer)
            self._found.trial = None

    def _gain(self, refusal: float, with_it: float) -> float:
        """Times the tokens for each number that is read, if one layer more is searched and so many are refused."""
        searched = len(self._found.layers)
        return self._rate(with_it, searched + 1) / self._rate(refusal, searched)

    def _saves(self, refusal: float, with_it: float) -> bool:
        """Whether what is left of the text has more of it than the first look at all keys takes."""
        searched, config = len(self._found.layers), self.tier.cache.full.pool.config
        saved = 1 / self._rate(refusal, searched) - 1 / self._rate(with_it, searched + 1)
        return self._left * saved > config.kv_size / config.layers * self._length

    def _rate(self, refusal: float, searched: int) -> float:
        """Tokens for each number that is read, at the best gamma.

        Numbers and not seconds, so that the same prompt and seed give the same text under `rejection`, too.
        """
        view, length = self.tier.cache, self._length
        config, guesses = view.full.pool.config, DRAFTED if self.tier.below else 1.0
        lower = PASS + config.weights_read + config.kv_size * view.keys(length, searched)
        full = PASS + config.weights_read + config.kv_size * length
        kept = 1 - min(1.0, max(0.0, refusal))
        return max(float(expected(kept, gamma)) / (gamma / guesses * lower + full) for gamma in WIDE)

    def _prefer(self, found: Finding) -> None:
        """Keep what is searched in memory, where KV is offloaded."""
        layers = [*found.layers, *([found.trial.layer] if found.trial else [])]
        if (offloaded := self.tier.cache.full.pool.offloaded) and layers:
            offloaded.prefer(layers)

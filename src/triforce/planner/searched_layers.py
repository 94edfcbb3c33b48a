"""Layers in which a retrieval tier searches the whole context: found while decoding, without passes of their own.

In most layers attention moves slowly, and the pages that the last verification attended to serve the next tokens. Heads
that retrieve facts attend to other places for every token (retrieval heads, Wu et al. 2024, arXiv 2404.15574), which a
budget hides: such a layer is worth a search in every pass, and the others need less.

A verification shows how much attention of each layer fell outside of the selected pages. Where fewer rejections would
pay, the layer that missed most is searched in some proposals and not in others, until acceptance tells which is better.
Nothing here can change a text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from triforce.distributed.group import ALONE, TPGroup
from triforce.kvcache import RetrievalView
from triforce.planner.plan import WIDE_GAMMAS, expected
from triforce.speculation import Tier

# Tokens per number read, over those without the layer: a trial has to promise so much, if rejections go with the square
# of the attention missed.
PROMISED_GAIN = 1.12
MIN_GAIN = 1.05  # the same, measured: a layer is searched from so much on
MAX_LAYERS = 4
MAX_NO_GAIN = 3  # layers tried without a gain, after which no other one is
MIN_TOKENS = 24  # draft tokens to judge by: whether fewer rejections would pay, and what a layer gained
MAX_TRIAL = 256  # draft tokens with a layer, after which it is judged in any case
BLOCK = 4  # consecutive proposals of a trial with the layer, or without it
MIN_LEFT = 16  # tokens that a text has still to come, or no layer is tried in it: the first search reads all keys
TOKENS_PER_PASS = 1.8  # of a tier with another one below it, roughly
NUMBERS_PER_PASS = 8e6  # that could be read in the fixed time of a pass


@dataclass(slots=True)
class Verdicts:
    """Draft tokens of the retrieval tier that were accepted, and rejected."""

    accepted: int = 0
    rejected: int = 0

    @staticmethod
    def read(saved: Any) -> Verdicts:
        """See `Finding.read`."""
        return Verdicts(_count(saved["accepted"]), _count(saved["rejected"]))

    @property
    def count(self) -> int:
        return self.accepted + self.rejected

    @property
    def rejection(self) -> float:
        """The share rejected, of one token more than there were."""
        return (self.rejected + 0.5) / (self.count + 1)

    @property
    def error(self) -> float:
        """The standard error of `rejection`."""
        return float((self.rejection * (1 - self.rejection) / (self.count + 1)) ** 0.5)


@dataclass(slots=True)
class Trial:
    """One layer more, and the verdicts without it and with it."""

    layer: int
    without: Verdicts = field(default_factory=Verdicts)
    searching: Verdicts = field(default_factory=Verdicts)


@dataclass(slots=True)
class Finding:
    """Findings for texts of some size: the layers to search, those tried without a gain, and the one on trial."""

    layers: list[int] = field(default_factory=list)
    no_gain: list[int] = field(default_factory=list)
    trial: Trial | None = None
    verdicts: Verdicts = field(default_factory=Verdicts)  # since layers were last considered

    @staticmethod
    def read(saved: Any) -> Finding:
        """A finding from the JSON of its `asdict`. Raises ValueError, TypeError or KeyError for any other JSON."""
        layers, no_gain = ([_count(layer) for layer in saved[name]] for name in ("layers", "no_gain"))
        found, trial = Finding(layers, no_gain, verdicts=Verdicts.read(saved["verdicts"])), saved["trial"]
        if trial is not None:
            without, searching = (Verdicts.read(trial[name]) for name in ("without", "searching"))
            found.trial = Trial(_count(trial["layer"]), without, searching)
        return found


Findings = dict[str, Finding]
"""Findings by size of context, budget and chunk."""


def _count(number: Any) -> int:
    if not isinstance(number, int) or number < 0:
        raise ValueError("neither a layer nor a count")
    return number


class SearchedLayers:
    """Chooses the searched layers of one batch, whose retrieval tier is `tier`.

    findings: of earlier texts, and added to. ranks: all follow rank 0, as each observes attention of its own heads.
    """

    def __init__(self, tier: Tier[RetrievalView], findings: Findings, ranks: TPGroup = ALONE) -> None:
        self.tier, self.findings, self._ranks = tier, findings, ranks
        self._bits, self._found = 0, Finding()
        self._length = self._left = self._turns = 0
        self._before, self._searching = (0, 0), False
        self.trying = False
        """Whether one of the layers of this proposal is on trial."""
        self.changed = False
        """Whether findings have changed."""

    def next_layers(self, length: int, left: int) -> frozenset[int]:
        """The layers to search next. length: tokens of the longest text; left: of one, those still to come at most."""
        if length.bit_length() != self._bits:
            self._enter(length.bit_length())
        self._length, self._left, self._before = length, left, self._verdicts()
        trial = self._found.trial
        if trial and self._turns % BLOCK == 0:
            self._searching = trial.searching.count <= trial.without.count
        self.trying = trial is not None and left >= MIN_LEFT and self._searching
        return frozenset(self._found.layers + ([trial.layer] if trial and self.trying else []))

    def observe(self) -> None:
        """Learn from the proposal that `next_layers` was called for."""
        accepted, rejected = (now - before for now, before in zip(self._verdicts(), self._before, strict=True))
        reads_much = self._length < 2 * self.tier.cache.budget(self._length)
        if accepted + rejected == 0 or reads_much:  # or another tier drafted
            return
        trial = self._found.trial
        verdicts = self._found.verdicts if trial is None else trial.searching if self.trying else trial.without
        verdicts.accepted, verdicts.rejected = verdicts.accepted + accepted, verdicts.rejected + rejected
        if trial:
            self._turns, self.changed = self._turns + 1, True
            self._conclude(trial)
        elif verdicts.count >= MIN_TOKENS:
            self._consider(verdicts)
            self._found.verdicts = Verdicts()

    def _enter(self, bits: int) -> None:
        """Take up the finding for a length of so many bits."""
        self._bits, self._turns = bits, 0
        found = self.findings.get(self._case(bits))
        if found is None:  # what pays in shorter ones pays here
            shorter = self.findings.get(self._case(bits - 1), Finding())
            found = Finding([*shorter.layers], [*shorter.no_gain])
        self._found = self.findings[self._case(bits)] = self._ranks.broadcast(found)
        layers = self.tier.cache.full.pool.config.layers
        self._found.layers = [layer for layer in self._found.layers if layer < layers]
        self._prefer(self._found)

    def _case(self, bits: int) -> str:
        setting = self.tier.cache.setting
        return f"{bits} {setting.budget.tokens or setting.budget.share} {setting.chunk}"

    def _verdicts(self) -> tuple[int, int]:
        counters = self.tier.counters
        return int(counters.accepted_B.sum()), int(counters.rejected_B.sum())

    def _consider(self, verdicts: Verdicts) -> None:
        """Begin a trial, if the layer that misses most attention promises enough."""
        found, no_gain = self._found.layers, self._found.no_gain
        view, config = self.tier.cache, self.tier.cache.full.pool.config
        offloaded = view.full.pool.offloaded  # other layers than whole ones would be read from their store
        most = min(MAX_LAYERS, offloaded.whole_layers) if offloaded else MAX_LAYERS
        rejection = verdicts.rejected / verdicts.count
        enough = len(found) >= min(most, config.layers - 1) or len(no_gain) >= MAX_NO_GAIN
        if enough or self._gain(rejection, 0.0) < PROMISED_GAIN:
            return
        missed = self._ranks.broadcast(self._missed())
        candidates = [layer for layer in range(config.layers) if missed and layer not in (*found, *no_gain)]
        if not candidates:
            return
        layer = max(candidates, key=missed.__getitem__)
        left_out = sum(missed[each] ** 2 for each in candidates)
        promised = rejection * (1 - missed[layer] ** 2 / max(left_out, 1e-9))
        if self._gain(rejection, promised) >= PROMISED_GAIN and self._saves(rejection, promised):
            self._found.trial, self._turns = Trial(layer), 0
            self._prefer(self._found)

    def _missed(self) -> list[float]:
        """Share of attention, by layer, outside of the selections, in the mean of the rows that have some."""
        view = self.tier.cache
        some = [missed_L for b in range(len(view.selections)) if (missed_L := view.missed(b)) is not None]
        return [sum(each) / len(some) for each in zip(*some, strict=True)]

    def _conclude(self, trial: Trial) -> None:
        """End a trial that has shown enough."""
        without, searching = trial.without, trial.searching
        if min(without.count, searching.count) < MIN_TOKENS:
            return
        error = 2 * (without.error**2 + searching.error**2) ** 0.5
        best, pays, worst = (self._gain(without.rejection, searching.rejection + by) for by in (-error, 0.0, error))
        well = pays >= MIN_GAIN and (worst >= 1 or searching.count >= MAX_TRIAL)
        if well or best < MIN_GAIN or searching.count >= MAX_TRIAL:
            (self._found.layers if well else self._found.no_gain).append(trial.layer)
            self._found.trial = None

    def _gain(self, rejection: float, with_it: float) -> float:
        """The factor of tokens per number read, if one layer more is searched and rejections change to `with_it`."""
        searched = len(self._found.layers)
        return self._rate(with_it, searched + 1) / self._rate(rejection, searched)

    def _saves(self, rejection: float, with_it: float) -> bool:
        """Whether the rest of the text saves more numbers than the first search of all keys reads."""
        searched, config = len(self._found.layers), self.tier.cache.full.pool.config
        saved = 1 / self._rate(rejection, searched) - 1 / self._rate(with_it, searched + 1)
        return self._left * saved > config.kv_size / config.layers * self._length

    def _rate(self, rejection: float, searched: int) -> float:
        """Tokens per number read, at the best gamma: not per second, as no text of a seed may depend on the clock."""
        view, length = self.tier.cache, self._length
        config, drafted = view.full.pool.config, TOKENS_PER_PASS if self.tier.below else 1.0
        lower = NUMBERS_PER_PASS + config.weights_read + config.kv_size * view.keys(length, searched)
        full = NUMBERS_PER_PASS + config.weights_read + config.kv_size * length
        accepted = 1 - min(1.0, max(0.0, rejection))
        return max(float(expected(accepted, gamma)) / (gamma / drafted * lower + full) for gamma in WIDE_GAMMAS)

    def _prefer(self, found: Finding) -> None:
        """Prefer searched layers on the device, where KV is offloaded."""
        layers = [*found.layers, *([found.trial.layer] if found.trial else [])]
        if (offloaded := self.tier.cache.full.pool.offloaded) and layers:
            offloaded.prefer(layers)

"""Layers in which a retrieval tier searches the whole context: found while decoding, without passes of their own.

In most layers attention moves slowly, and the pages that the last verification attended to serve the next tokens. Heads
that retrieve facts attend to other places for every token (retrieval heads, Wu et al. 2024, arXiv 2404.15574), which a
budget hides: such a layer is worth a search in every pass, and the others need less.

A verification shows how much attention of each layer fell outside of the selected pages. Where fewer rejections would
pay, the layer that missed most is searched in some proposals and not in others, until acceptance tells which is better.
Nothing here can change a text.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import hypot

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


Verdicts = list[int]
"""Draft tokens of the retrieval tier that were accepted, and rejected."""


@dataclass(slots=True)
class Finding:
    """Findings for texts of some size: the layers to search, those tried without a gain, and the one on trial.

    without, searching: verdicts without the layer on trial, and with it; all are `without` one where none is.
    """

    layers: list[int] = field(default_factory=list)
    no_gain: list[int] = field(default_factory=list)
    trial: int | None = None
    without: Verdicts = field(default_factory=lambda: [0, 0])
    searching: Verdicts = field(default_factory=lambda: [0, 0])

    def follow(self, other: Finding) -> None:
        """Become what another one is, for all who hold this one."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))

    def begin(self, trial: int | None) -> None:
        """Judge anew, with this layer on trial, or none."""
        self.trial = trial
        self.without = [0, 0]
        self.searching = [0, 0]


Findings = dict[str, Finding]
"""Findings by size of context, budget and chunk."""


def _rejection(verdicts: Verdicts) -> tuple[float, float]:
    """The share rejected, of one token more than there were, and its standard error."""
    count = sum(verdicts) + 1
    share = (verdicts[1] + 0.5) / count
    return share, (share * (1 - share) / count) ** 0.5


class SearchedLayers:
    """Chooses the searched layers of one batch, whose retrieval tier is `tier`.

    findings: of earlier texts, and added to. ranks: all follow rank 0, as each observes attention of its own heads.
    """

    def __init__(self, tier: Tier[RetrievalView], findings: Findings, ranks: TPGroup = ALONE) -> None:
        self.tier = tier
        self.findings = findings
        self._ranks = ranks
        self._bits = 0
        self._found = Finding()
        self._length = self._left = self._turns = 0
        self._before = [0, 0]
        self._searching = False
        self.trying = False
        """Whether one of the layers of this proposal is on trial."""
        self.changed = False
        """Whether a trial went on, so that findings are to be kept."""

    def next_layers(self, length: int, left: int) -> frozenset[int]:
        """The layers to search next. length: tokens of the longest text; left: of one, those still to come at most."""
        if length.bit_length() != self._bits:
            self._enter(length.bit_length())
        found, self._length, self._left, self._before = self._found, length, left, self._verdicts()
        if self._turns % BLOCK == 0:
            self._searching = sum(found.searching) <= sum(found.without)
        self.trying = found.trial is not None and left >= MIN_LEFT and self._searching
        return frozenset(found.layers if found.trial is None or not self.trying else [*found.layers, found.trial])

    def observe(self) -> None:
        """Learn from the proposal that `next_layers` was called for."""
        now = self._verdicts()
        before = self._before
        found = self._found
        reads_much = self._length < 2 * self.tier.cache.budget(self._length)
        if now == before or reads_much:  # or another tier drafted
            return
        seen = found.searching if self.trying else found.without
        seen[:] = [count + later - earlier for count, later, earlier in zip(seen, now, before, strict=True)]
        self._turns = self._turns + 1
        self.changed = self.changed or found.trial is not None
        if found.trial is not None:
            self._conclude(found, found.trial)
        elif sum(found.without) >= MIN_TOKENS:
            self._turns = 0
            found.begin(self._promising(found, _rejection(found.without)[0]))
            self._prefer()

    def _enter(self, bits: int) -> None:
        """Take up the finding for a length of so many bits."""
        self._bits = bits
        self._turns = 0
        found = self.findings.get(self._case(bits))
        if found is None:  # what pays in shorter ones pays here
            shorter = self.findings.get(self._case(bits - 1), Finding())
            found = Finding([*shorter.layers], [*shorter.no_gain])
        told = self._ranks.broadcast(found)
        # One object for all batches, as on rank 0: a batch that goes on behind another one has learnt what that did.
        self._found = self.findings.setdefault(self._case(bits), told)
        self._found.follow(told)
        self._prefer()

    def _case(self, bits: int) -> str:
        setting = self.tier.cache.setting
        return f"{bits} {setting.budget.tokens or setting.budget.share} {setting.chunk}"

    def _verdicts(self) -> Verdicts:
        counters = self.tier.counters
        return [int(counters.accepted_B.sum()), int(counters.rejected_B.sum())]

    def _promising(self, found: Finding, rejection: float) -> int | None:
        """The layer that misses most attention, if it promises enough at this share of draft tokens rejected."""
        view = self.tier.cache
        config = self.tier.cache.full.pool.config
        offloaded = view.full.pool.offloaded  # other layers than whole ones would be read from their store
        most = min(MAX_LAYERS, config.layers - 1, offloaded.whole_layers if offloaded else MAX_LAYERS)
        enough = len(found.layers) >= most or len(found.no_gain) >= MAX_NO_GAIN
        if enough or self._gain(rejection, 0.0) < PROMISED_GAIN:
            return None
        missed = self._ranks.broadcast(self._missed())
        tried = {*found.layers, *found.no_gain}  # and layers with a window see all of it anyway
        possible = [layer for layer, window in enumerate(config.windows) if not window and layer not in tried]
        if not (possible and missed):
            return None
        layer = max(possible, key=missed.__getitem__)
        left_out = sum(missed[each] ** 2 for each in possible)
        promised = rejection * (1 - missed[layer] ** 2 / left_out) if left_out else rejection
        return layer if self._gain(rejection, promised) >= PROMISED_GAIN and self._saves(rejection, promised) else None

    def _missed(self) -> list[float]:
        """Share of attention, by layer, outside of the selections: the mean of rows that have some; [] if none has."""
        view = self.tier.cache
        some = [missed_L for b in range(len(view.selections)) if (missed_L := view.missed(b)) is not None]
        return [sum(each) / len(some) for each in zip(*some, strict=True)]

    def _conclude(self, found: Finding, layer: int) -> None:
        """End a trial of a layer that has shown enough."""
        if min(sum(found.without), sum(found.searching)) < MIN_TOKENS:
            return
        (before, error), (after, other) = _rejection(found.without), _rejection(found.searching)
        most = 2 * hypot(error, other)
        best, pays, worst = (self._gain(before, after + by) for by in (-most, 0.0, most))
        last = sum(found.searching) >= MAX_TRIAL
        well = pays >= MIN_GAIN and (worst >= 1 or last)
        if well or best < MIN_GAIN or last:
            (found.layers if well else found.no_gain).append(layer)
            found.begin(None)
            self._prefer()

    def _gain(self, rejection: float, with_it: float) -> float:
        """The factor of tokens per number read, if one layer more is searched and rejections change to `with_it`."""
        searched = len(self._found.layers)
        return self._rate(with_it, searched + 1) / self._rate(rejection, searched)

    def _saves(self, rejection: float, with_it: float) -> bool:
        """Whether the rest of the text saves more numbers than the first search of all keys reads."""
        searched = len(self._found.layers)
        config = self.tier.cache.full.pool.config
        saved = 1 / self._rate(rejection, searched) - 1 / self._rate(with_it, searched + 1)
        return self._left * saved > config.kv_size / config.layers * self._length

    def _rate(self, rejection: float, searched: int) -> float:
        """Tokens per number read, at the best gamma: not per second, as no text of a seed may depend on the clock."""
        view = self.tier.cache
        length = self._length
        config = view.full.pool.config
        drafted = TOKENS_PER_PASS if self.tier.below else 1.0
        full = NUMBERS_PER_PASS + config.weights_read + config.kv_read(length)
        of_layers = config.windows.count(0) * config.kv_size // config.layers  # those without a window
        lower = full - of_layers * (length - view.keys(length, searched))
        accepted = 1 - min(1.0, max(0.0, rejection))
        return max(float(expected(accepted, gamma)) / (gamma / drafted * lower + full) for gamma in WIDE_GAMMAS)

    def _prefer(self) -> None:
        """Prefer searched layers on the device, where KV is offloaded."""
        layers = [*self._found.layers, *([] if self._found.trial is None else [self._found.trial])]
        if (offloaded := self.tier.cache.full.pool.offloaded) and layers:
            offloaded.prefer(layers)

"""Layers in which a retrieval tier searches the whole context. They are found while decoding, without extra passes.

In most layers attention moves slowly, and the pages that the last verification attended to serve the next tokens. Heads
that retrieve facts attend to other places for every token (retrieval heads, Wu et al. 2024, arXiv 2404.15574), which a
budget hides. Such a layer is worth a search in every pass, and the others need less.

A verification measures how much attention of each layer fell outside of the selected pages. Where fewer rejections
would pay, the layer that missed most is put on trial: it is searched in some proposals and not in others, until
acceptance shows which is better. The choice of layers cannot change a text.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import hypot

from triforce.distributed.group import ALONE, TPGroup
from triforce.kvcache import RetrievalView
from triforce.planner.plan import WIDE_GAMMAS, expected
from triforce.speculation import Tier

# Gain: tokens per number read with the layer, over those without it. It is the least gain that a trial must promise, if
# rejections go with the square of the missed attention.
PROMISED_GAIN = 1.12
MIN_GAIN = 1.05  # the least measured gain of a layer that is searched from then on
MAX_LAYERS = 4
MAX_NO_GAIN = 3  # layers tried without a gain, after which no further one is tried
MIN_TOKENS = 24  # draft tokens to judge by: whether fewer rejections would pay, and what a layer gained
MAX_TRIAL = 256  # draft tokens with a layer, after which it is judged in any case
BLOCK = 4  # consecutive proposals of a trial with the layer, or without it
MIN_REMAINING = 16  # fewest tokens still to come for which a layer is tried: the first search reads all keys
TOKENS_PER_PASS = 1.8  # of a tier with another one below it, roughly
NUMBERS_PER_PASS = 8e6  # fixed time of a pass, as the numbers that could be read in it


Verdicts = list[int]
"""Counts of the retrieval tier's draft tokens: accepted, and rejected."""


@dataclass(slots=True)
class Finding:
    """Findings for texts of one size.

    layers: to search. no_gain: layers tried without a gain. trial: the layer on trial. without, searching: verdicts
    without the layer on trial, and with it. While no layer is on trial all verdicts count as `without`.
    """

    layers: list[int] = field(default_factory=list)
    no_gain: list[int] = field(default_factory=list)
    trial: int | None = None
    without: Verdicts = field(default_factory=lambda: [0, 0])
    searching: Verdicts = field(default_factory=lambda: [0, 0])

    def copy_from(self, other: Finding) -> None:
        """Copy all fields of `other` in place, so that every holder of this object has them."""
        for entry in fields(self):
            setattr(self, entry.name, getattr(other, entry.name))

    def begin(self, trial: int | None) -> None:
        """Reset the verdicts and put this layer on trial; None: no layer."""
        self.trial = trial
        self.without = [0, 0]
        self.searching = [0, 0]


Findings = dict[str, Finding]
"""Findings by size of context, budget and chunk."""


def _rejection(verdicts: Verdicts) -> tuple[float, float]:
    """The share of rejected tokens, with half a rejection added to one more token, and its standard error."""
    count = sum(verdicts) + 1
    share = (verdicts[1] + 0.5) / count
    return share, (share * (1 - share) / count) ** 0.5


class SearchedLayers:
    """Chooses the searched layers of one batch, whose retrieval tier is `tier`.

    findings: of earlier texts; this batch adds to them. ranks: all follow rank 0, as each rank observes the attention
    of its own heads.
    """

    def __init__(self, tier: Tier[RetrievalView], findings: Findings, ranks: TPGroup = ALONE) -> None:
        self.tier = tier
        self.findings = findings
        self._ranks = ranks
        self._bits = 0
        self._finding = Finding()
        self._length = self._remaining_tokens = self._trial_proposals = 0
        self._old_verdicts = [0, 0]
        self._searching = False
        self.trying = False
        """Whether this proposal searches the layer on trial."""
        self.changed = False
        """Whether a trial recorded verdicts, so that the findings are to be saved."""

    def next_layers(self, length: int, remaining_tokens: int) -> frozenset[int]:
        """The layers to search in the next proposal.

        length: tokens of the longest text. remaining_tokens: the most that are still to come in one text.
        """
        if length.bit_length() != self._bits:
            self._set_length_bucket(length.bit_length())
        finding = self._finding
        self._length = length
        self._remaining_tokens = remaining_tokens
        self._old_verdicts = self._verdicts()
        if self._trial_proposals % BLOCK == 0:
            self._searching = sum(finding.searching) <= sum(finding.without)
        self.trying = finding.trial is not None and remaining_tokens >= MIN_REMAINING and self._searching
        return frozenset(
            finding.layers if finding.trial is None or not self.trying else [*finding.layers, finding.trial]
        )

    def observe(self) -> None:
        """Record the verdicts of the proposal that `next_layers` was called for, and judge the trial."""
        verdicts = self._verdicts()
        old_verdicts = self._old_verdicts
        finding = self._finding
        reads_much = self._length < 2 * self.tier.cache.budget(self._length)
        if verdicts == old_verdicts or reads_much:  # no verdict: another tier drafted
            return
        totals = finding.searching if self.trying else finding.without
        totals[:] = [total + new - old for total, new, old in zip(totals, verdicts, old_verdicts, strict=True)]
        self._trial_proposals = self._trial_proposals + 1
        self.changed = self.changed or finding.trial is not None
        if finding.trial is not None:
            self._judge_trial(finding, finding.trial)
        elif sum(finding.without) >= MIN_TOKENS:
            self._trial_proposals = 0
            finding.begin(self._next_trial(finding, _rejection(finding.without)[0]))
            self._keep_resident()

    def _set_length_bucket(self, bits: int) -> None:
        """Continue with the finding for lengths of `bits` bits."""
        self._bits = bits
        self._trial_proposals = 0
        finding = self.findings.get(self._finding_key(bits))
        if finding is None:  # layers that pay in shorter texts pay in longer ones
            shorter = self.findings.get(self._finding_key(bits - 1), Finding())
            finding = Finding([*shorter.layers], [*shorter.no_gain])
        shared_finding = self._ranks.broadcast(finding)
        # One object for all batches, as on rank 0: a batch that goes on after another one has its findings as well.
        self._finding = self.findings.setdefault(self._finding_key(bits), shared_finding)
        self._finding.copy_from(shared_finding)
        self._keep_resident()

    def _finding_key(self, bits: int) -> str:
        setting = self.tier.cache.setting
        return f"{bits} {setting.budget.tokens or setting.budget.share} {setting.chunk}"

    def _verdicts(self) -> Verdicts:
        counters = self.tier.counters
        return [int(counters.accepted_B.sum()), int(counters.rejected_B.sum())]

    def _next_trial(self, finding: Finding, rejection: float) -> int | None:
        """The layer that misses most attention, if it promises enough at this rejection; None: no layer does."""
        view = self.tier.cache
        config = self.tier.cache.full.pool.config
        offloaded = view.full.pool.offloaded  # layers that are not resident as a whole would be read from their store
        max_layers = min(MAX_LAYERS, config.layers - 1, offloaded.whole_layers if offloaded else MAX_LAYERS)
        complete = len(finding.layers) >= max_layers or len(finding.no_gain) >= MAX_NO_GAIN
        if complete or self._gain(rejection, 0.0) < PROMISED_GAIN:
            return None
        missed = self._ranks.broadcast(self._missed_attention())
        tried = {*finding.layers, *finding.no_gain}
        # Layers with a window see all of it anyway.
        candidates = [layer for layer, window in enumerate(config.windows) if not window and layer not in tried]
        if not (candidates and missed):
            return None
        layer = max(candidates, key=missed.__getitem__)
        left_out = sum(missed[candidate] ** 2 for candidate in candidates)
        promised = rejection * (1 - missed[layer] ** 2 / left_out) if left_out else rejection
        return layer if self._gain(rejection, promised) >= PROMISED_GAIN and self._saves(rejection, promised) else None

    def _missed_attention(self) -> list[float]:
        """Share of attention outside of the selections, by layer: the mean over rows that have one; [] if none has."""
        view = self.tier.cache
        observed = [missed_L for b in range(len(view.selections)) if (missed_L := view.missed(b)) is not None]
        return [sum(layer_shares) / len(observed) for layer_shares in zip(*observed, strict=True)]

    def _judge_trial(self, finding: Finding, layer: int) -> None:
        """End the trial of `layer` if its verdicts suffice, and search it from then on or not."""
        if min(sum(finding.without), sum(finding.searching)) < MIN_TOKENS:
            return
        base_rejection, base_error = _rejection(finding.without)
        trial_rejection, trial_error = _rejection(finding.searching)
        margin = 2 * hypot(base_error, trial_error)
        best_gain, gain, worst_gain = (
            self._gain(base_rejection, trial_rejection + shift) for shift in (-margin, 0.0, margin)
        )
        trial_over = sum(finding.searching) >= MAX_TRIAL
        adopted = gain >= MIN_GAIN and (worst_gain >= 1 or trial_over)
        if adopted or best_gain < MIN_GAIN or trial_over:
            (finding.layers if adopted else finding.no_gain).append(layer)
            finding.begin(None)
            self._keep_resident()

    def _gain(self, rejection: float, new_rejection: float) -> float:
        """Factor of tokens per number read, if one more layer is searched and `rejection` becomes `new_rejection`."""
        searched = len(self._finding.layers)
        return self._rate(new_rejection, searched + 1) / self._rate(rejection, searched)

    def _saves(self, rejection: float, new_rejection: float) -> bool:
        """Whether the rest of the text saves more reads of numbers than the first search of all keys takes."""
        searched = len(self._finding.layers)
        config = self.tier.cache.full.pool.config
        saved = 1 / self._rate(rejection, searched) - 1 / self._rate(new_rejection, searched + 1)
        return self._remaining_tokens * saved > config.kv_size / config.layers * self._length

    def _rate(self, rejection: float, searched: int) -> float:
        """Tokens per number read, at the best gamma. Not per second: no text of a seed may depend on the clock."""
        view = self.tier.cache
        length = self._length
        config = view.full.pool.config
        drafted = TOKENS_PER_PASS if self.tier.below else 1.0
        full = NUMBERS_PER_PASS + config.weights_read + config.kv_read(length)
        of_layers = config.windows.count(0) * config.kv_size // config.layers  # of the layers without a window
        lower = full - of_layers * (length - view.keys(length, searched))
        accepted = 1 - min(1.0, max(0.0, rejection))
        return max(float(expected(accepted, gamma)) / (gamma / drafted * lower + full) for gamma in WIDE_GAMMAS)

    def _keep_resident(self) -> None:
        """Have offloading keep the searched layers on the device."""
        layers = [*self._finding.layers, *([] if self._finding.trial is None else [self._finding.trial])]
        if (offloaded := self.tier.cache.full.pool.offloaded) and layers:
            offloaded.prefer(layers)

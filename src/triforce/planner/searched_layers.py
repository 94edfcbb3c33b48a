"""Layers in which a retrieval tier searches the whole context. They are found while decoding, without extra passes.

In most layers attention moves slowly: pages to which the last verification attended also serve the next tokens. Heads
that retrieve facts attend to other places for every token (retrieval heads, Wu et al. 2024, arXiv 2404.15574). Pages
selected before do not hold these places, so a layer with such heads is worth a search in every pass.

A verification measures how much attention of each layer fell outside of the selected pages. If the rejections that a
search might prevent outweigh its reads, the layer that missed most is put on trial: it is searched in some proposals
and not in others, until acceptance shows which is better. Under `seeded` the choice of layers cannot change a text.

`SequenceBatch` in `engine/sequence_batch.py` calls `next_layers` before a proposal with the retrieval tier, and
`observe` after it. Every mode with this tier does so, unless an option names the layers.

Number: an element of weights or KV that a pass reads. Costs are counted in numbers read, not in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import hypot

from triforce.distributed.group import ALONE, TPGroup
from triforce.kvcache import RetrievalView
from triforce.planner.plan import WIDE_GAMMAS, expected_tokens
from triforce.speculation import Tier

# Gain of a layer: the ratio of two rates in tokens per number read, with a search in the layer and without. A trial
# must promise `PROMISED_GAIN`, under the assumption that rejections are proportional to the square of the missed
# attention.
PROMISED_GAIN = 1.12
MIN_GAIN = 1.05  # the least measured gain of a layer that is searched from then on
MAX_LAYERS = 4  # most searched layers
MAX_NO_GAIN = 3  # layers tried without a gain, after which no further one is tried
MIN_TOKENS = 24  # fewest draft tokens before a trial begins, and fewest of each variant before it is judged
MAX_TRIAL = 256  # draft tokens with a layer, after which it is judged in any case
BLOCK = 4  # consecutive proposals of a trial with the layer, or without it
MIN_REMAINING = 16  # fewest tokens still to come for which a layer is tried: the first search reads all keys
TOKENS_PER_PASS = 1.8  # assumed tokens of a pass of the retrieval tier, if a tier below it drafts
NUMBERS_PER_PASS = 8e6  # fixed time of a pass, as the numbers that could be read in it


Verdicts = list[int]
"""Counts of the retrieval tier's draft tokens: accepted, and rejected."""


@dataclass(slots=True)
class Finding:
    """Findings for texts of one size.

    layers: to search. no_gain: layers tried without a gain. trial: the layer on trial. baseline_verdicts: verdicts
    without a search in the layer on trial; all verdicts while no layer is on trial. trial_verdicts: verdicts with the
    search.
    """

    layers: list[int] = field(default_factory=list)
    no_gain: list[int] = field(default_factory=list)
    trial: int | None = None
    baseline_verdicts: Verdicts = field(default_factory=lambda: [0, 0])
    trial_verdicts: Verdicts = field(default_factory=lambda: [0, 0])

    def copy_from(self, other: Finding) -> None:
        """Copy all fields of `other` in place, so that every holder of this object has them."""
        for entry in fields(self):
            setattr(self, entry.name, getattr(other, entry.name))

    def begin(self, trial: int | None) -> None:
        """Reset the verdicts and put this layer on trial; None: no layer."""
        self.trial = trial
        self.baseline_verdicts = [0, 0]
        self.trial_verdicts = [0, 0]


Findings = dict[str, Finding]
"""Findings by size of context, budget and chunk."""


def _rejection(verdicts: Verdicts) -> tuple[float, float]:
    """Return the share of rejected tokens and its standard error. The prior is one token with half a rejection."""
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
        """Return the layers to search in the next proposal.

        length: tokens of the longest text. remaining_tokens: upper bound of the tokens still to come in one text.
        """
        if length.bit_length() != self._bits:
            self._set_size(length.bit_length())
        finding = self._finding
        self._length = length
        self._remaining_tokens = remaining_tokens
        self._old_verdicts = self._verdicts()
        if self._trial_proposals % BLOCK == 0:
            self._searching = sum(finding.trial_verdicts) <= sum(finding.baseline_verdicts)
        self.trying = finding.trial is not None and remaining_tokens >= MIN_REMAINING and self._searching
        return frozenset(
            finding.layers if finding.trial is None or not self.trying else [*finding.layers, finding.trial]
        )

    def observe(self) -> None:
        """Record the verdicts of the proposal that `next_layers` was called for, and judge the trial."""
        verdicts = self._verdicts()
        old_verdicts = self._old_verdicts
        finding = self._finding
        reads_most = self._length < 2 * self.tier.cache.budget(self._length)
        # Without new verdicts there is nothing to record. A tier that reads most of the context misses little in any
        # layer.
        if verdicts == old_verdicts or reads_most:
            return
        totals = finding.trial_verdicts if self.trying else finding.baseline_verdicts
        totals[:] = [total + new - old for total, new, old in zip(totals, verdicts, old_verdicts, strict=True)]
        self._trial_proposals = self._trial_proposals + 1
        self.changed = self.changed or finding.trial is not None
        if finding.trial is not None:
            self._judge_trial(finding, finding.trial)
        elif sum(finding.baseline_verdicts) >= MIN_TOKENS:
            self._trial_proposals = 0
            finding.begin(self._next_trial(finding, _rejection(finding.baseline_verdicts)[0]))
            self._keep_resident()

    def _set_size(self, bits: int) -> None:
        """Continue with the finding for texts of this size: `bits` bits in their token count."""
        self._bits = bits
        self._trial_proposals = 0
        finding = self.findings.get(self._finding_key(bits))
        if finding is None:  # layers that pay in shorter texts pay in longer ones
            shorter = self.findings.get(self._finding_key(bits - 1), Finding())
            finding = Finding([*shorter.layers], [*shorter.no_gain])
        shared_finding = self._ranks.broadcast(finding)
        # Batches with the same `findings` share one object for texts of one size. Under `seeded` the engine gives all
        # batches the same `findings`, so a batch also uses those of one that runs beside it.
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
        """Return the layer that misses most attention, if it promises enough at this rejection; None: no layer does."""
        view = self.tier.cache
        config = self.tier.cache.full.pool.config
        # A search of a layer that is not resident as a whole would read all of it from its store.
        offloaded = view.full.pool.offloaded
        max_layers = min(MAX_LAYERS, config.layers - 1, offloaded.max_resident_layers if offloaded else MAX_LAYERS)
        complete = len(finding.layers) >= max_layers or len(finding.no_gain) >= MAX_NO_GAIN
        if complete or self._gain(rejection, 0.0) < PROMISED_GAIN:
            return None
        missed = self._ranks.broadcast(self._missed_attention())
        tried = {*finding.layers, *finding.no_gain}
        # A layer with a window reads its whole window anyway.
        candidates = [layer for layer, window in enumerate(config.windows) if not window and layer not in tried]
        if not (candidates and missed):
            return None
        layer = max(candidates, key=missed.__getitem__)
        sum_of_squares = sum(missed[candidate] ** 2 for candidate in candidates)
        new_rejection = rejection * (1 - missed[layer] ** 2 / sum_of_squares) if sum_of_squares else rejection
        pays = self._gain(rejection, new_rejection) >= PROMISED_GAIN and self._saves(rejection, new_rejection)
        return layer if pays else None

    def _missed_attention(self) -> list[float]:
        """Return the share of attention outside of the selections, by layer: the mean over rows with a selection.

        Returns [] if no row has one.
        """
        view = self.tier.cache
        observed = [missed_L for b in range(len(view.selections)) if (missed_L := view.missed(b)) is not None]
        return [sum(layer_shares) / len(observed) for layer_shares in zip(*observed, strict=True)]

    def _judge_trial(self, finding: Finding, layer: int) -> None:
        """End the trial of `layer` if its verdicts suffice, and search it from then on or not."""
        if min(sum(finding.baseline_verdicts), sum(finding.trial_verdicts)) < MIN_TOKENS:
            return
        base_rejection, base_error = _rejection(finding.baseline_verdicts)
        trial_rejection, trial_error = _rejection(finding.trial_verdicts)
        margin = 2 * hypot(base_error, trial_error)
        best_gain, gain, worst_gain = (
            self._gain(base_rejection, trial_rejection + shift) for shift in (-margin, 0.0, margin)
        )
        trial_over = sum(finding.trial_verdicts) >= MAX_TRIAL
        adopted = gain >= MIN_GAIN and (worst_gain >= 1 or trial_over)
        if adopted or best_gain < MIN_GAIN or trial_over:
            (finding.layers if adopted else finding.no_gain).append(layer)
            finding.begin(None)
            self._keep_resident()

    def _gain(self, rejection: float, new_rejection: float) -> float:
        """Return the factor by which a search in one more layer raises the tokens per number read.

        The search turns `rejection` into `new_rejection`.
        """
        searched = len(self._finding.layers)
        return self._rate(new_rejection, searched + 1) / self._rate(rejection, searched)

    def _saves(self, rejection: float, new_rejection: float) -> bool:
        """Whether search saves more reads in the rest of the text than the first search adds: all KV of the layer."""
        searched = len(self._finding.layers)
        config = self.tier.cache.full.pool.config
        saved = 1 / self._rate(rejection, searched) - 1 / self._rate(new_rejection, searched + 1)
        return self._remaining_tokens * saved > config.kv_size / config.layers * self._length

    def _rate(self, rejection: float, searched: int) -> float:
        """Return tokens per number read, at the best gamma.

        No clock is read: under `rejection` and `block` the choice of layers changes the text of a seed.
        """
        view = self.tier.cache
        length = self._length
        config = view.full.pool.config
        drafted = TOKENS_PER_PASS if self.tier.below else 1.0
        full = NUMBERS_PER_PASS + config.weights_read + config.kv_numbers_read(length)
        unwindowed_kv = config.windows.count(0) * config.kv_size // config.layers  # of the layers without a window
        lower = full - unwindowed_kv * (length - view.keys_read(length, searched))
        accepted = 1 - min(1.0, max(0.0, rejection))
        return max(float(expected_tokens(accepted, gamma)) / (gamma / drafted * lower + full) for gamma in WIDE_GAMMAS)

    def _keep_resident(self) -> None:
        """Ask for the searched layers, and the layer on trial, to be resident where KV is offloaded."""
        layers = [*self._finding.layers, *([] if self._finding.trial is None else [self._finding.trial])]
        if (offloaded := self.tier.cache.full.pool.offloaded) and layers:
            offloaded.prefer(layers)

"""Costs of forward passes in seconds, acceptance and findings: learnt while decoding, and kept between runs."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import log
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from triforce.backends import dispatch
from triforce.installed import version_of
from triforce.planner.pass_costs import PassCosts, Seen, TierWork
from triforce.planner.plan import NGRAM_GAMMAS, NgramOdds
from triforce.planner.planner_config import CONFIG
from triforce.planner.searched_layers import Finding
from triforce.speculation import NgramProposer, SequenceState
from triforce.speculation.ngram import ALONE, BEFORE_A_DRAFT
from triforce.user_cache import user_cache
from triforce.whole_file import whole_file

# Acceptance before anything was observed: high, so that tiers are tried. Of n-grams: times what hindsight predicts.
PRIOR_ACCEPTANCE = {"ngram": 0.9, "draft": 0.65, "retrieval": 0.9}
TEMPERATURE_BOUNDS = (0.0, 0.5, 0.9, 1.1)  # between them, texts are about equally easy to predict

MAX_GAMMA = max(NGRAM_GAMMAS)  # tokens that n-grams propose in hindsight
KNOWN = 8  # tokens behind a place that are compared: where all are right, as many as were proposed are taken to be
PLACE_DECAY = 0.94  # of what hindsight has seen before, per place
PROMPT_PLACE = 0.25  # of the prompt's places, once the text has places of its own: it may go another way
PRIOR_PLACES = 2  # places without a match, before anything was seen
MOST_PLACES = 96  # those before them hardly count


Case = tuple[str, int, int, float]
"""Tier and temperature; of a retrieval tier also the bits of the context, and times the usual budget."""


class AcceptanceHistory:
    """Draft tokens accepted and rejected, by case. memory: proposals over which they fade; limit: tokens of a case."""

    def __init__(self, memory: float, limit: float) -> None:
        self.of: dict[Case, tuple[float, float]] = {}
        self._memory = memory
        self._limit = limit

    def add(self, case: Case, accepted: float, rejected: float) -> None:
        """Count some draft tokens."""
        before = self.of.get(case, (0.0, 0.0))
        accepted = before[0] + accepted
        rejected = before[1] + rejected
        part = min(1.0, self._limit / max(accepted + rejected, 1.0))
        self.of[case] = accepted * part, rejected * part

    def fade(self, proposals: int) -> None:
        """Let all cases fade by so many proposals."""
        part = (1 - 1 / self._memory) ** proposals
        self.of = {case: (accepted * part, rejected * part) for case, (accepted, rejected) in self.of.items()}

    def expected(self, case: Case) -> tuple[float, float]:
        """Return the acceptance to expect in the mean of texts; and tokens behind it."""
        *usual, factor = case
        mean, tokens = self._mean((*usual, 1.0), PRIOR_ACCEPTANCE[case[0]], CONFIG.prior_tokens)  # type: ignore[arg-type]
        if factor != 1.0:
            supposed = max(0.0, 1 - (1 - mean) * factor**-CONFIG.budget_exponent)
            mean, tokens = self._mean(case, supposed, min(CONFIG.budget_tokens, tokens))
        return mean, tokens

    def pooled(self, tier: str, bands: Sequence[int], prior: float) -> tuple[float, float]:
        """Return a tier's acceptance in all texts of some bands of temperature, with the usual budget; and its tokens.

        prior: the acceptance of some tokens that come on top.
        """
        seen = [sums for case, sums in self.of.items() if case[0] == tier and case[1] in bands and case[3] == 1.0]
        accepted, rejected = (sum(each) for each in zip((0.0, 0.0), *seen, strict=True))
        weight = CONFIG.prior_tokens
        tokens = accepted + rejected
        return (accepted + weight * prior) / (tokens + weight), tokens

    def _mean(self, case: Case, prior: float, weight: float) -> tuple[float, float]:
        """The acceptance in a case, where so many tokens of `prior` acceptance come on top; and all tokens."""
        accepted, rejected = self.of.get(case, (0.0, 0.0))
        tokens = accepted + rejected + weight
        return (accepted + weight * prior) / tokens, tokens


class AcceptanceTracker:
    """Beliefs about acceptance in one batch, of this mean temperature."""

    def __init__(self, history: AcceptanceHistory, temperature: float) -> None:
        self._history = history
        self._here = AcceptanceHistory(CONFIG.text_memory, float("inf"))
        self.enter(temperature)

    def enter(self, temperature: float) -> None:
        """Let what comes be of another mean temperature, as rows joined or left."""
        self.temperature = sum(temperature > bound for bound in TEMPERATURE_BOUNDS)

    def add(self, tier: str, length: int, accepted: float, rejected: float, factor: float = 1.0) -> None:
        """Count a tier's draft tokens in texts of about this length, with so many times the usual budget."""
        for sums in (self._here, self._history):
            sums.add(self._case(tier, length, factor), accepted, rejected)

    def fade(self, proposals: int) -> None:
        """Let what was seen fade by so many proposals."""
        for sums in (self._here, self._history):
            sums.fade(proposals)

    def of(self, tier: str, length: int, factor: float = 1.0) -> tuple[float, float]:
        """The acceptance of a tier, and its standard deviation.

        The ratio of rejections here to those elsewhere is taken to be the same for all budgets: so what this text
        showed with one tells of others, as far as these were seen elsewhere.
        """
        mean, tokens = self._history.expected(self._case(tier, length, factor))
        usual = 1 - mean
        prior = min(tokens, CONFIG.history_tokens)
        here = self._of_tier(tier)
        expected = sum(sum(sums) * (1 - self._history.expected(case)[0]) for case, sums in here.items())
        rejected = sum(sums[1] for sums in here.values())
        count = prior + self.tokens(tier)
        found = max(0.0, 1 - usual * (rejected + prior * usual) / max(expected + prior * usual, 1e-9))
        shrunk = (found * count + 0.5) / (count + 1)  # of none in few, some may still come
        few = 1 / (count + 1) + (factor != 1.0) / (tokens + 1)
        return found, (shrunk * (1 - shrunk) * few) ** 0.5

    def tokens(self, tier: str) -> float:
        """Draft tokens of this text that count."""
        return sum(sum(sums) for sums in self._of_tier(tier).values())

    def kind(self, lengths: Sequence[int]) -> tuple[int, int, int]:
        """The kind of texts of these lengths: rows, temperature and size. One plan is best for texts of a kind."""
        return len(lengths), self.temperature, max(lengths).bit_length()

    def _of_tier(self, tier: str) -> dict[Case, tuple[float, float]]:
        return {case: sums for case, sums in self._here.of.items() if case[0] == tier}

    def _case(self, tier: str, length: int, factor: float) -> Case:
        """The case that acceptance depends on."""
        return (tier, self.temperature, *((length.bit_length(), factor) if tier == "retrieval" else (0, 1.0)))


class NgramHindsight:
    """Means over places of the text, the latest ones most, of n-grams before a draft (0) and alone (1).

    The tokens behind a place are known by now, and so is what n-grams would have proposed there: without a pass, the
    n-gram tier is judged whether it is in use or not. Shape suffixes are those of `plan`, and P places.
    """

    def __init__(self, ngrams: NgramProposer) -> None:
        self._ngrams = ngrams
        self.places = deque([(0, 0, False)] * PRIOR_PLACES, maxlen=MOST_PLACES)
        """Matches and hits of the latest ones, and whether each lies behind the prompt; the first ones had none."""

    def update(self, prefix: SequenceState, b: int) -> int:
        """Try the new text of row b; returns how many of its tokens n-grams predicted."""
        tried = list(self._ngrams.hindsight(prefix, b, KNOWN))
        self.places += tried
        return sum(hits for _, hits, _ in tried)

    def odds(self) -> NgramOdds:
        """Return what the places say."""
        match_P, hits_P, own_P = np.array(self.places).T
        weight_P = PLACE_DECAY ** np.arange(len(match_P))[::-1]
        if own_P.any():
            weight_P[own_P == 0] *= PROMPT_PLACE
        weight_AP = (match_P >= np.array([[BEFORE_A_DRAFT], [ALONE]])) * (weight_P / weight_P.sum())
        reach_P = np.array([NgramProposer.reach(match) for match in match_P.tolist()])
        proposed_PG = np.minimum(reach_P[:, None], np.arange(MAX_GAMMA + 1))
        accepted_PG = np.minimum(proposed_PG, np.where(hits_P < KNOWN, hits_P, MAX_GAMMA)[:, None])
        inside_AP = weight_AP * (hits_P >= KNOWN)
        outside_AP = weight_AP * (hits_P < KNOWN)
        looped_A = inside_AP.sum(1)
        outside_AP /= np.maximum(1e-9, 1 - looped_A[:, None])
        of_places = outside_AP.sum(1), outside_AP @ proposed_PG, outside_AP @ accepted_PG
        return NgramOdds(
            *of_places, looped_A, inside_AP @ (1 / (1 + accepted_PG)), inside_AP @ (proposed_PG / (1 + accepted_PG))
        )


FORM = 2  # of what the file holds; one of another form is not read
OLD_PASSES = 4.0  # that those of the file count as, of a kind


class CostModel:
    """Seconds of `passes`, `acceptance` of draft tokens, and `layers` to search.

    path: their file, if any. level: that of the kernels.
    """

    def __init__(self, path: Path | None = None, works: Mapping[str, TierWork] | None = None, level: str = "") -> None:
        self.path = path
        self.passes = PassCosts(dict(works or {}), level)
        self.acceptance = AcceptanceHistory(CONFIG.history_memory, CONFIG.history_limit)
        self.layers: dict[str, Finding] = {}
        self.kinds: dict[tuple[int, int, int], Any] = {}
        """What the latest text of a kind leaves to the next one: choice, account and cadence of its controller."""
        with suppress(OSError, ValueError):  # all of it can be learnt again
            digest, saved = path.read_text(encoding="utf-8").split("\n", 1) if path else ("", "")
            if digest == _digest(saved):  # else it is not what a process of ours wrote
                self._read(json.loads(saved))

    def save(self) -> None:
        """Write the file for the next process; a folder that cannot be written to is ignored.

        Where this process found the machine slower, kinds of passes that it did not run stay as they were read: what is
        thought to take long is not tried, and so is not corrected.
        """
        if self.path is None:
            return
        layers = {case: asdict(found) for case, found in self.layers.items()}
        shift = log(self.passes.speed)
        kinds = [(tier, kind, x) for tier, costs in self.passes.tiers.items() for kind, x in costs.seen.items()]
        passes = [
            (tier, *kind, x.count, x.keys, x.log + (shift if x.own else min(shift, 0))) for tier, kind, x in kinds
        ]
        shares = [(*case, *sums) for case, sums in self.acceptance.of.items()]
        saved = json.dumps({"passes": passes, "shares": shares, "layers": layers})
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.path) as partial:
                partial.write_text(f"{_digest(saved)}\n{saved}", encoding="utf-8")

    def _read(self, saved: Any) -> None:
        """Take what a file holds."""
        for tier, width, rows, size, count, keys, took in saved["passes"]:
            self.passes.of(tier).seen[width, rows, size] = Seen(min(count, OLD_PASSES), keys, took, own=False)
        for costs in self.passes.tiers.values():
            costs.changed(fit=True)
        for *case, accepted, rejected in saved["shares"]:
            self.acceptance.add(tuple(case), accepted, rejected)
        self.layers |= {case: Finding(**found) for case, found in saved["layers"].items()}


def _digest(saved: str) -> str:
    """Return what a file begins with whose content has this form."""
    return f"{FORM} {crc32(saved.encode())}"


def kernel_level(device: torch.device) -> str:
    """The level of the kernels that compute on a device."""
    native = dispatch.native if device.type == "cpu" else None
    return native.level() if native else "torch"


def costs_path(models: list[str], device: torch.device, dtype: torch.dtype) -> Path | None:
    """The path of the file for some models on a device of this machine, in the cache folder of XDG.

    Its name has the device, the level of the kernels and the dtype; its digest these, the version, the machine, its
    threads and the models. None for a user without a home folder.
    """
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return machine_file("costs", models, [kind, kernel_level(device), str(dtype).removeprefix("torch.")], device)


def machine_file(what: str, about: Sequence[str], names: Sequence[str], device: torch.device) -> Path | None:
    """The path of a file of this version and machine with its threads, about some things; it is called by `names`."""
    native = dispatch.native if device.type == "cpu" else None
    threads = native.threads() if native else torch.get_num_threads()
    installed = version_of("triforce")  # kernels of another one may be faster, and its file may have another form
    facts = [*about, *names, installed, platform.node(), platform.machine(), str(threads)]
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    cache = user_cache()
    return cache / f"{what}-{re.sub(r'[^a-z0-9]+', '-', '-'.join(names).lower())}-{key}.json" if cache else None

"""Seconds of forward passes, acceptance of draft tokens, and searched layers: learnt in decoding, kept between runs."""

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
from triforce.planner.pass_costs import PassCosts, PassStats, TierWork
from triforce.planner.plan import NGRAM_GAMMAS, NgramOdds
from triforce.planner.planner_config import CONFIG
from triforce.planner.searched_layers import Finding
from triforce.speculation import NgramProposer, SequenceState
from triforce.speculation.ngram import MIN_MATCH_ABOVE_DRAFT, MIN_MATCH_ALONE
from triforce.user_cache import user_cache
from triforce.whole_file import whole_file

# Acceptance before any observation: high, so that tiers are tried. Of n-grams: factor of what hindsight predicts.
PRIOR_ACCEPTANCE = {"ngram": 0.9, "draft": 0.65, "retrieval": 0.9}
TEMPERATURE_BOUNDS = (0.0, 0.5, 0.9, 1.1)  # between them, texts are about equally easy to predict

MAX_GAMMA = max(NGRAM_GAMMAS)  # tokens that n-grams propose in hindsight
KNOWN_TOKENS = 8  # tokens compared behind a place: where all are right, all proposed tokens count as accepted
PLACE_DECAY = 0.94  # factor of a place's weight, for each later place
PROMPT_WEIGHT = 0.25  # factor of the prompt's places once the text has places of its own: it may go another way
PRIOR_PLACES = 2  # places without a match, as a prior
MAX_PLACES = 96  # earlier places hardly count


Case = tuple[str, int, int, float]
"""Tier, band of temperature, and for a retrieval tier the bits of the context and the factor of the usual budget."""


class AcceptanceHistory:
    """Draft tokens accepted and rejected, by case. memory: proposals over which they fade. limit: tokens of a case."""

    def __init__(self, memory: float, limit: float) -> None:
        self.verdicts: dict[Case, tuple[float, float]] = {}
        self._memory = memory
        self._limit = limit

    def add(self, case: Case, accepted: float, rejected: float) -> None:
        """Add draft tokens to a case."""
        old_sums = self.verdicts.get(case, (0.0, 0.0))
        accepted = old_sums[0] + accepted
        rejected = old_sums[1] + rejected
        part = min(1.0, self._limit / max(accepted + rejected, 1.0))
        self.verdicts[case] = accepted * part, rejected * part

    def fade(self, proposals: int) -> None:
        """Let all cases fade by this number of proposals."""
        part = (1 - 1 / self._memory) ** proposals
        self.verdicts = {
            case: (accepted * part, rejected * part) for case, (accepted, rejected) in self.verdicts.items()
        }

    def expected(self, case: Case) -> tuple[float, float]:
        """Return the mean acceptance to expect, and the number of tokens that it rests on."""
        *base_case, factor = case
        mean, tokens = self._mean((*base_case, 1.0), PRIOR_ACCEPTANCE[case[0]], CONFIG.prior_tokens)  # type: ignore[arg-type]
        if factor != 1.0:
            prior = max(0.0, 1 - (1 - mean) * factor**-CONFIG.budget_exponent)
            mean, tokens = self._mean(case, prior, min(CONFIG.budget_tokens, tokens))
        return mean, tokens

    def pooled(self, tier: str, bands: Sequence[int], prior: float) -> tuple[float, float]:
        """Return a tier's acceptance in these bands of temperature with the usual budget, and its number of tokens.

        prior: acceptance of the `CONFIG.prior_tokens` tokens that are added.
        """
        matching_sums = [
            sums for case, sums in self.verdicts.items() if case[0] == tier and case[1] in bands and case[3] == 1.0
        ]
        accepted, rejected = (sum(counts) for counts in zip((0.0, 0.0), *matching_sums, strict=True))
        weight = CONFIG.prior_tokens
        tokens = accepted + rejected
        return (accepted + weight * prior) / (tokens + weight), tokens

    def _mean(self, case: Case, prior: float, weight: float) -> tuple[float, float]:
        """The acceptance in a case with `weight` tokens of acceptance `prior` added, and the number of all tokens."""
        accepted, rejected = self.verdicts.get(case, (0.0, 0.0))
        tokens = accepted + rejected + weight
        return (accepted + weight * prior) / tokens, tokens


class AcceptanceTracker:
    """Estimates of acceptance in one batch. temperature: the mean of its rows."""

    def __init__(self, history: AcceptanceHistory, temperature: float) -> None:
        self._history = history
        self._text_history = AcceptanceHistory(CONFIG.text_memory, float("inf"))
        self.set_temperature(temperature)

    def set_temperature(self, temperature: float) -> None:
        """Set the mean temperature of the rows, after some joined or left."""
        self.temperature = sum(temperature > bound for bound in TEMPERATURE_BOUNDS)

    def add(self, tier: str, length: int, accepted: float, rejected: float, factor: float = 1.0) -> None:
        """Add draft tokens of a tier in texts of about this length. factor: of the usual budget."""
        for sums in (self._text_history, self._history):
            sums.add(self._case(tier, length, factor), accepted, rejected)

    def fade(self, proposals: int) -> None:
        """Let all observations fade by this number of proposals."""
        for sums in (self._text_history, self._history):
            sums.fade(proposals)

    def estimate(self, tier: str, length: int, factor: float = 1.0) -> tuple[float, float]:
        """The acceptance of a tier, and its standard deviation.

        The ratio of this text's rejections to those of earlier texts is taken to be the same for all budgets. So
        observations of this text with one budget also estimate other budgets, if earlier texts used these.
        """
        mean, tokens = self._history.expected(self._case(tier, length, factor))
        rejection = 1 - mean
        prior = min(tokens, CONFIG.history_tokens)
        text_sums = self._of_tier(tier)
        predicted = sum(sum(sums) * (1 - self._history.expected(case)[0]) for case, sums in text_sums.items())
        rejected = sum(sums[1] for sums in text_sums.values())
        count = prior + self.tokens(tier)
        acceptance = max(0.0, 1 - rejection * (rejected + prior * rejection) / max(predicted + prior * rejection, 1e-9))
        shrunk = (acceptance * count + 0.5) / (count + 1)  # few tokens without a rejection prove little
        inverse_count = 1 / (count + 1) + (factor != 1.0) / (tokens + 1)
        return acceptance, (shrunk * (1 - shrunk) * inverse_count) ** 0.5

    def tokens(self, tier: str) -> float:
        """Draft tokens of this text that count, after fading."""
        return sum(sum(sums) for sums in self._of_tier(tier).values())

    def kind(self, lengths: Sequence[int]) -> tuple[int, int, int]:
        """The kind of these texts: rows, band of temperature, bits of the longest. Texts of a kind share a plan."""
        return len(lengths), self.temperature, max(lengths).bit_length()

    def _of_tier(self, tier: str) -> dict[Case, tuple[float, float]]:
        return {case: sums for case, sums in self._text_history.verdicts.items() if case[0] == tier}

    def _case(self, tier: str, length: int, factor: float) -> Case:
        """The case that acceptance depends on."""
        return (tier, self.temperature, *((length.bit_length(), factor) if tier == "retrieval" else (0, 1.0)))


class NgramHindsight:
    """Odds of n-grams before a draft (0) and alone (1): means over places of the text.

    The latest places weigh most. The tokens behind a place are known, and so are the tokens that n-grams would have
    proposed there. So the n-gram tier is evaluated without a pass, whether it is in use or not. Shape suffixes: those
    of `plan`, and P places.
    """

    def __init__(self, ngrams: NgramProposer) -> None:
        self._ngrams = ngrams
        self.places = deque([(0, 0, False)] * PRIOR_PLACES, maxlen=MAX_PLACES)
        """Of the latest places: tokens of the match, hits, and whether the place lies behind the prompt."""

    def update(self, prefix: SequenceState, b: int) -> int:
        """Evaluate the new places of row b. Returns how many tokens n-grams predicted there."""
        new_places = list(self._ngrams.hindsight(prefix, b, KNOWN_TOKENS))
        self.places += new_places
        return sum(hits for _, hits, _ in new_places)

    def odds(self) -> NgramOdds:
        """Return the odds by the latest places."""
        match_P, hits_P, own_P = np.array(self.places).T
        weight_P = PLACE_DECAY ** np.arange(len(match_P))[::-1]
        if own_P.any():
            weight_P[own_P == 0] *= PROMPT_WEIGHT
        weight_AP = (match_P >= np.array([[MIN_MATCH_ABOVE_DRAFT], [MIN_MATCH_ALONE]])) * (weight_P / weight_P.sum())
        reach_P = np.array([NgramProposer.reach(match) for match in match_P.tolist()])
        proposed_PG = np.minimum(reach_P[:, None], np.arange(MAX_GAMMA + 1))
        accepted_PG = np.minimum(proposed_PG, np.where(hits_P < KNOWN_TOKENS, hits_P, MAX_GAMMA)[:, None])
        inside_AP = weight_AP * (hits_P >= KNOWN_TOKENS)
        outside_AP = weight_AP * (hits_P < KNOWN_TOKENS)
        looped_A = inside_AP.sum(1)
        outside_AP /= np.maximum(1e-9, 1 - looped_A[:, None])
        of_places = outside_AP.sum(1), outside_AP @ proposed_PG, outside_AP @ accepted_PG
        return NgramOdds(
            *of_places, looped_A, inside_AP @ (1 / (1 + accepted_PG)), inside_AP @ (proposed_PG / (1 + accepted_PG))
        )


FORMAT = 2  # version of the file; a file of another version is not read
FILE_PASSES = 4.0  # most passes that a kind from the file counts as


class CostModel:
    """Seconds of `passes`, `acceptance` of draft tokens, and `layers` to search.

    path: the file that keeps them, if any. works: by tier. level: of the kernels.
    """

    def __init__(self, path: Path | None = None, works: Mapping[str, TierWork] | None = None, level: str = "") -> None:
        self.path = path
        self.passes = PassCosts(dict(works or {}), level)
        self.acceptance = AcceptanceHistory(CONFIG.history_memory, CONFIG.history_limit)
        self.layers: dict[str, Finding] = {}
        self.kinds: dict[tuple[int, int, int], Any] = {}
        """Choice, account and cadence that the controller of the latest text of a kind leaves to the next one."""
        with suppress(OSError, ValueError):  # all of it can be learnt again
            digest, saved = path.read_text(encoding="utf-8").split("\n", 1) if path else ("", "")
            if digest == _digest(saved):  # else no process of this version wrote it
                self._read(json.loads(saved))

    def save(self) -> None:
        """Write the file for the next process. A folder that cannot be written to is ignored.

        Where this process found the machine slower, kinds of passes that it did not run stay as they were read: a plan
        that is expected to take long is not tried, so its cost would not be corrected.
        """
        if self.path is None:
            return
        layers = {case: asdict(finding) for case, finding in self.layers.items()}
        shift = log(self.passes.speed)
        kinds = [
            (tier, kind, stats) for tier, costs in self.passes.tiers.items() for kind, stats in costs.stats.items()
        ]
        passes = [
            (tier, *kind, stats.count, stats.keys, stats.log + (shift if stats.measured_here else min(shift, 0)))
            for tier, kind, stats in kinds
        ]
        shares = [(*case, *sums) for case, sums in self.acceptance.verdicts.items()]
        saved = json.dumps({"passes": passes, "shares": shares, "layers": layers})
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.path) as partial:
                partial.write_text(f"{_digest(saved)}\n{saved}", encoding="utf-8")

    def _read(self, saved: Any) -> None:
        """Take over the content of a file."""
        for tier, width, rows, size, count, keys, log_seconds in saved["passes"]:
            self.passes.of(tier).stats[width, rows, size] = PassStats(
                min(count, FILE_PASSES), keys, log_seconds, measured_here=False
            )
        for costs in self.passes.tiers.values():
            costs.invalidate(refit=True)
        for *case, accepted, rejected in saved["shares"]:
            self.acceptance.add(tuple(case), accepted, rejected)
        self.layers |= {case: Finding(**finding) for case, finding in saved["layers"].items()}


def _digest(saved: str) -> str:
    """Return the first line of the file: the version of the format, and a checksum of the content."""
    return f"{FORMAT} {crc32(saved.encode())}"


def kernel_level(device: torch.device) -> str:
    """The level of the kernels that compute on a device."""
    native = dispatch.native if device.type == "cpu" else None
    return native.level() if native else "torch"


def costs_path(models: list[str], device: torch.device, dtype: torch.dtype) -> Path | None:
    """The path of the costs of these models on a device of this machine, in the cache folder of XDG.

    The name has the device, the level of the kernels and the dtype. The digest covers these, the version, the machine,
    its threads and the models. None for a user without a home folder.
    """
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return machine_file("costs", models, [kind, kernel_level(device), str(dtype).removeprefix("torch.")], device)


def machine_file(what: str, subjects: Sequence[str], names: Sequence[str], device: torch.device) -> Path | None:
    """The path of a file of this version, this machine and its threads. `names` are in its name and in its digest.

    subjects: further facts of the digest, such as models. None for a user without a home folder.
    """
    native = dispatch.native if device.type == "cpu" else None
    threads = native.threads() if native else torch.get_num_threads()
    installed = version_of("triforce")  # another version may have faster kernels and another format
    facts = [*subjects, *names, installed, platform.node(), platform.machine(), str(threads)]
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    cache = user_cache()
    return cache / f"{what}-{re.sub(r'[^a-z0-9]+', '-', '-'.join(names).lower())}-{key}.json" if cache else None

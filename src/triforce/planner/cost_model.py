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

from triforce.arrays import DType, is_gpu
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

# Acceptance before any observation: high, so that tiers are tried. For n-grams: factor on what hindsight predicts.
PRIOR_ACCEPTANCE = {"ngram": 0.9, "draft": 0.65, "retrieval": 0.9}
TEMPERATURE_BOUNDS = (0.0, 0.5, 0.9, 1.1)  # between them, texts are about equally easy to predict

MAX_GAMMA = max(NGRAM_GAMMAS)  # tokens that n-grams propose in hindsight
KNOWN_TOKENS = 8  # tokens compared after a place: where all are right, all proposed tokens count as accepted
PLACE_DECAY = 0.94  # factor of a place's weight, for each later place
PROMPT_WEIGHT = 0.25
"""Factor of the weights of the prompt's places once the answer has places: an answer may repeat itself less than the
prompt, or repeat other passages."""
PRIOR_PLACES = 2  # places without a match, as a prior
MAX_PLACES = 96  # latest places that are kept: earlier ones hardly count


Case = tuple[str, int, int, float]
"""Tier, band of temperature, and for a retrieval tier the bits of the context and the factor of the default budget."""


class AcceptanceHistory:
    """Draft tokens accepted and rejected, by case. memory: proposals over which they fade.

    limit: most tokens of a case; with more, both counts are scaled down.
    """

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

    def expected_acceptance(self, case: Case) -> tuple[float, float]:
        """Return the mean acceptance to expect, and the number of tokens that it rests on."""
        *base_case, factor = case
        mean, tokens = self._mean((*base_case, 1.0), PRIOR_ACCEPTANCE[case[0]], CONFIG.prior_tokens)  # type: ignore[arg-type]
        if factor != 1.0:
            prior = max(0.0, 1 - (1 - mean) * factor**-CONFIG.budget_exponent)
            mean, tokens = self._mean(case, prior, min(CONFIG.budget_tokens, tokens))
        return mean, tokens

    def pooled(self, tier: str, bands: Sequence[int], prior: float) -> tuple[float, float]:
        """Return a tier's acceptance in these bands of temperature with the default budget, and its number of tokens.

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
        """Return a case's acceptance with `weight` tokens of acceptance `prior` added, and the number of all tokens."""
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
        """Set the mean temperature of the rows, after some joined or left.

        If the band changes, the prior comes from earlier texts of the new band. Verdicts of this text are kept:
        `estimate` sets each against the rejections expected in the band in which it was observed. Plans are weighed
        when next due.
        """
        self.temperature_band = sum(temperature > bound for bound in TEMPERATURE_BOUNDS)

    def add(self, tier: str, length: int, accepted: float, rejected: float, factor: float = 1.0) -> None:
        """Add draft tokens of a tier in texts of about this length. factor: budget over the default budget."""
        for sums in (self._text_history, self._history):
            sums.add(self._case(tier, length, factor), accepted, rejected)

    def fade(self, proposals: int) -> None:
        """Let all observations fade by this number of proposals."""
        for sums in (self._text_history, self._history):
            sums.fade(proposals)

    def estimate(self, tier: str, length: int, factor: float = 1.0) -> tuple[float, float]:
        """Return the acceptance of a tier, and its standard deviation. factor: budget over the default budget.

        The history, of earlier texts and of this one so far, gives the rejections to expect in each case. These
        expectations are multiplied by one ratio: the rejections of this text over those expected for it. So
        observations with one budget also correct the estimates for others. Both sides of the ratio include the same
        prior: the rejections that the history expects among at most `CONFIG.history_tokens` tokens of the estimated
        case.

        If all verdicts of this text are of the estimated case, the result is the mean of a Beta distribution. The prior
        of that distribution is the acceptance in the history, with a weight of at most `CONFIG.history_tokens` tokens.
        The variance is m (1 - m) / (n + 1), as of a Beta distribution of n tokens with mean m. n includes the prior. m
        is the returned mean with one imaginary token added that is half accepted, since few tokens without a rejection
        prove little. For a budget other than the default one, the uncertainty of its expected acceptance is added.
        """
        mean, tokens = self._history.expected_acceptance(self._case(tier, length, factor))
        rejection = 1 - mean
        prior = min(tokens, CONFIG.history_tokens)
        text_sums = self._of_tier(tier)
        expected_rejections = sum(
            sum(sums) * (1 - self._history.expected_acceptance(case)[0]) for case, sums in text_sums.items()
        )
        rejected = sum(sums[1] for sums in text_sums.values())
        count = prior + self.tokens(tier)
        acceptance = max(
            0.0, 1 - rejection * (rejected + prior * rejection) / max(expected_rejections + prior * rejection, 1e-9)
        )
        shrunk = (acceptance * count + 0.5) / (count + 1)  # few tokens without a rejection prove little
        inverse_count = 1 / (count + 1) + (factor != 1.0) / (tokens + 1)
        return acceptance, (shrunk * (1 - shrunk) * inverse_count) ** 0.5

    def tokens(self, tier: str) -> float:
        """Return the number of this text's draft tokens, after fading."""
        return sum(sum(sums) for sums in self._of_tier(tier).values())

    def text_kind(self, lengths: Sequence[int]) -> tuple[int, int, int]:
        """Return the kind of these texts: rows, band of temperature, bits of the longest.

        A text begins with the plan of the latest text of its kind, or with plain decoding if that plan has n-grams.
        """
        return len(lengths), self.temperature_band, max(lengths).bit_length()

    def _of_tier(self, tier: str) -> dict[Case, tuple[float, float]]:
        return {case: sums for case, sums in self._text_history.verdicts.items() if case[0] == tier}

    def _case(self, tier: str, length: int, factor: float) -> Case:
        """Return the case that acceptance depends on."""
        return (tier, self.temperature_band, *((length.bit_length(), factor) if tier == "retrieval" else (0, 1.0)))


class NgramHindsight:
    """Odds of n-grams above a draft (0) and alone (1): means over places of the text, in loops of rounds per token.

    The latest places weigh most. The tokens after a place are known, and so are the tokens that n-grams would have
    proposed there. So the n-gram tier is evaluated without a pass, whether it is in use or not. Shape suffixes: those
    of `plan`, and P places.
    """

    def __init__(self, ngrams: NgramProposer) -> None:
        self._ngrams = ngrams
        self.places = deque([(0, 0, False)] * PRIOR_PLACES, maxlen=MAX_PLACES)
        """Of the latest places: tokens of the match, hits, and whether the place lies after the prompt."""

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
        reach_P = np.array([NgramProposer.proposal_length(match) for match in match_P.tolist()])
        proposed_PG = np.minimum(reach_P[:, None], np.arange(MAX_GAMMA + 1))
        accepted_PG = np.minimum(proposed_PG, np.where(hits_P < KNOWN_TOKENS, hits_P, MAX_GAMMA)[:, None])
        inside_AP = weight_AP * (hits_P >= KNOWN_TOKENS)
        outside_AP = weight_AP * (hits_P < KNOWN_TOKENS)
        looped_A = inside_AP.sum(1)
        outside_AP /= np.maximum(1e-9, 1 - looped_A[:, None])
        return NgramOdds(
            found_A=outside_AP.sum(1),
            proposed_AG=outside_AP @ proposed_PG,
            accepted_AG=outside_AP @ accepted_PG,
            looped_A=looped_A,
            rounds_AG=inside_AP @ (1 / (1 + accepted_PG)),
            offered_AG=inside_AP @ (proposed_PG / (1 + accepted_PG)),
        )


FORMAT = 3  # version of the file; a file of another version is not read
FILE_PASSES = 4.0  # a kind of pass from the file counts as this number of passes at most


class CostModel:
    """Seconds of `passes`, `acceptance` of draft tokens, and `findings` on layers to search.

    path: the file that keeps them between processes; None: no file. works: work of the passes of each tier. level: the
    instruction set of the kernels, by `kernel_level`.
    """

    def __init__(self, path: Path | None = None, works: Mapping[str, TierWork] | None = None, level: str = "") -> None:
        self.path = path
        self.passes = PassCosts(dict(works or {}), level)
        self.acceptance = AcceptanceHistory(CONFIG.history_memory, CONFIG.history_limit)
        self.findings: dict[str, Finding] = {}
        self.state_by_text_kind: dict[tuple[int, int, int], Any] = {}
        """Choice, account and cadence that the latest text of a kind leaves to the next one; not kept in the file."""
        with suppress(OSError, ValueError):  # all of it can be learnt again
            digest, saved = path.read_text(encoding="utf-8").split("\n", 1) if path else ("", "")
            if digest == _digest(saved):  # else there is no path, or the file is damaged or has another format
                self._read(json.loads(saved))

    def save(self) -> None:
        """Write the file for the next process. The engine calls this when all rows of a batch have ended.

        A folder that cannot be written to is ignored. If the machine became slower in this process, only the kinds of
        passes that this process ran are saved with the slower seconds. A kind that was not measured would otherwise
        look slow in the file, and plans that need it would never be tried.
        """
        if self.path is None:
            return
        findings = {case: asdict(finding) for case, finding in self.findings.items()}
        shift = log(self.passes.slowdown)
        kinds = [
            (tier, kind, stats) for tier, costs in self.passes.tiers.items() for kind, stats in costs.stats.items()
        ]
        shifts = [shift if stats.measured_here else min(shift, 0) for _, _, stats in kinds]
        passes = [
            (tier, *kind, stats.count, stats.keys, stats.log_seconds + own_shift)
            for (tier, kind, stats), own_shift in zip(kinds, shifts, strict=True)
        ]
        shares = [(*case, *sums) for case, sums in self.acceptance.verdicts.items()]
        saved = json.dumps({"passes": passes, "shares": shares, "findings": findings})
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
        self.findings |= {case: Finding(**finding) for case, finding in saved["findings"].items()}


def _digest(saved: str) -> str:
    """Return the first line of the file: the version of the format, and a checksum of the content."""
    return f"{FORMAT} {crc32(saved.encode())}"


def kernel_level(device: str) -> str:
    """Return the level of the kernels: the instruction set that they use on a device, such as `avx512bf16`.

    Without native kernels for the device the level is `torch`.
    """
    native = None if is_gpu(device) else dispatch.native
    return native.level() if native else "torch"


def costs_path(models: list[str], device: str, dtype: DType) -> Path | None:
    """Return the path of the costs of these models on a device of this machine, in the cache folder of XDG.

    The file name has the device, the level of the kernels and the dtype, and a digest of these, the version, the
    machine, its threads and the models. Returns None for a user without a home folder.
    """
    return machine_file("costs", models, [_device_name(device), kernel_level(device), dtype], device)


def _device_name(device: str) -> str:
    if not is_gpu(device):
        return device
    from triforce.backends.torch.devices import device_name

    return device_name(device)


def machine_file(prefix: str, digest_facts: Sequence[str], name_parts: Sequence[str], device: str) -> Path | None:
    """Return the path of a cache file for this version, machine and number of threads.

    The file name has the prefix, the `name_parts`, and a digest of all facts. digest_facts: facts that only the digest
    has, such as models. Returns None for a user without a home folder.
    """
    native = None if is_gpu(device) else dispatch.native
    threads = native.threads() if native else _torch_threads()
    installed = version_of("triforce")  # another version may have faster kernels and another format
    facts = [*digest_facts, *name_parts, installed, platform.node(), platform.machine(), str(threads)]
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    cache = user_cache()
    return cache / f"{prefix}-{re.sub(r'[^a-z0-9]+', '-', '-'.join(name_parts).lower())}-{key}.json" if cache else None


def _torch_threads() -> int:
    import torch

    return int(torch.get_num_threads())

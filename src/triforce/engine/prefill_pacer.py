"""PrefillPacer: how many prompt tokens are read between two steps of running texts, by the time there is.

Chunked prefill beside decoding is that of Agrawal et al. 2024 (Sarathi-Serve, arXiv 2403.02310). A chunk is sized by a
bound on the inter-token latency (ITL) here, whatever the model's speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import NamedTuple

from triforce.distributed.group import TPGroup
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.sequence_group import SequenceGroup

UNKNOWN = 64
"""Tokens of the first pass of a tier, whose speed is not known yet."""
LEAST, LEAST_ON_GPU = 16, 128
"""Tokens of a pass at least, which its size is a multiple of: fewer cost no less, and on a GPU would be captured."""


class PrefillPacer:
    """Grants passes of prefill their sizes, by the time that tokens took so far. Rank 0 measures for all.

    max_itl: seconds that may pass between two steps. least: tokens of a pass at least. strict: sizes of passes may not
    depend on the clock.
    """

    def __init__(self, max_itl: float, ranks: TPGroup, least: int = LEAST, *, strict: bool = False) -> None:
        self._max_itl, self._ranks, self._least, self._strict = max_itl, ranks, least, strict
        self._rates: dict[str, float] = {}
        """Seconds that a token took in the latest pass of each tier."""
        self._texts_wait, self._until = False, 0.0

    def begin(self, running: bool, step_seconds: float = 0.0) -> None:
        """Start to count the time between two steps. running: texts wait for their next step meanwhile.

        step_seconds: what a step of all texts takes.
        """
        self._texts_wait = running and not self._strict
        self._until = perf_counter() + self._max_itl - step_seconds

    def grant(self, tier: str, tokens: int) -> int:
        """Grant a pass of `tier` all tokens; where texts wait, as many as there is time for."""
        if self._texts_wait:
            now, rate = perf_counter(), self._rates.get(tier)
            affordable = UNKNOWN if rate is None else int((self._until - now) / rate)
            whole = max(self._least, affordable // self._least * self._least)
            tokens = self._ranks.broadcast(min(tokens, whole))
        return tokens

    def passed(self, tier: str, tokens: int, seconds: float) -> None:
        """Note what a pass took."""
        self._rates[tier] = seconds / tokens

    def more(self) -> bool:
        """Whether there is time for another part of a prompt before the next step."""
        return self._ranks.broadcast(perf_counter() < self._until)


class PacedPrompt:
    """Passes over one prompt, as a pacer grants them; parts of other prompts' passes may come in between."""

    def __init__(self, pacer: PrefillPacer) -> None:
        self._pacer = pacer
        self._tier, self._tokens, self._seconds = "", 0, 0.0

    def grant(self, tier: str, tokens: int) -> int:
        """Grant the next pass its tokens (a `speculation.Grant`); the one before is over."""
        self.end()
        self._tier, self._tokens, self._seconds = tier, self._pacer.grant(tier, tokens), 0.0
        return self._tokens

    def took(self, seconds: float) -> None:
        """Note what a part of the pass that was granted latest took."""
        self._seconds += seconds

    def end(self) -> None:
        """Let the pacer know what that pass took in all, if there was one."""
        if self._tokens:
            self._pacer.passed(self._tier, self._tokens, self._seconds)
        self._tokens = 0


class PrefillTask(NamedTuple):
    """A group on its way to its first tokens. passes: yields tokens seen, and tokens in all, after parts of passes."""

    group: SequenceGroup
    batch: SequenceBatch
    pace: PacedPrompt
    passes: Iterator[tuple[int, int]]

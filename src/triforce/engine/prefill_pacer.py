"""How many prompt tokens are read between two steps of the texts that are being decoded: as many as there is time for.

Chunked prefill beside decoding is that of Agrawal et al. 2024 (Sarathi-Serve, arXiv 2403.02310). A chunk is sized by a
bound on the inter-token latency (ITL) here, whatever the model's speed.
"""

from __future__ import annotations

from time import perf_counter

from triforce.distributed.group import TPGroup

MAX_ITL = 0.2
"""Seconds."""
UNKNOWN = 64
"""Tokens of the first pass of a tier whose speed nobody knows yet."""
LEAST, LEAST_ON_GPU = 16, 128
"""Tokens of a pass at least, and what its size is a multiple of: fewer cost no less, and on a GPU would be captured."""


class PrefillPacer:
    """`max_itl`: seconds that may pass between two steps. `strict`: sizes of passes may not depend on the clock.

    What rank 0 measures holds for all.
    """

    def __init__(self, max_itl: float, ranks: TPGroup, least: int = LEAST, *, strict: bool = False) -> None:
        self._max_itl, self._ranks, self._least, self._strict = max_itl, ranks, least, strict
        self._rates: dict[str, float] = {}
        """Seconds that a token took in the latest pass of each tier."""
        self._step = 0.0
        self._hurried, self._until = False, 0.0
        self._granted: tuple[str, int, float] | None = None

    def begin(self, running: bool) -> None:
        """Prompts may be read from now on; `running`: there are texts that wait for their next step meanwhile."""
        self._hurried = running and not self._strict
        self._until = perf_counter() + self._max_itl - self._step
        self._granted = None  # a pass that broke took no time that tells anything

    def grant(self, tier: str, tokens: int) -> int:
        """A `speculation.Grant`: all of them unless texts wait, else as many as there is time for."""
        if self._hurried:
            now, rate = perf_counter(), self._rates.get(tier)
            affordable = UNKNOWN if rate is None else int((self._until - now) / rate)
            whole = max(self._least, affordable // self._least * self._least)
            tokens = self._ranks.broadcast(min(tokens, whole))
        self._granted = tier, tokens, perf_counter()
        return tokens

    def passed(self) -> None:
        """The pass that was granted, if there was one, is over."""
        if self._granted:
            tier, tokens, since = self._granted
            self._rates[tier] = (perf_counter() - since) / tokens
            self._granted = None

    def more(self) -> bool:
        """Whether there is time for another pass before the next step."""
        return self._ranks.broadcast(perf_counter() < self._until)

    def stepped(self, seconds: float) -> None:
        """A step of all texts took so long."""
        self._step = seconds

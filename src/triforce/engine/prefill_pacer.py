"""PrefillPacer: how many tokens a prefill pass may have while running texts wait for their next step."""

from __future__ import annotations

from time import perf_counter

from triforce.distributed.group import TPGroup

FIRST_PASS_TOKENS = 64
"""Tokens of the first pass of a tier, while its speed is unknown."""
MIN_PASS_TOKENS, MIN_PASS_TOKENS_ON_GPU = 16, 128
"""Tokens: where `PrefillPacer` limits a pass, the limit is a multiple of this number, and at least this number. Only a
pass with fewer tokens left is smaller. Smaller passes take no less time."""


class PrefillPacer:
    """Grants prefill passes their sizes, by the measured time of a token. Rank 0 measures for all ranks.

    max_itl: largest inter-token latency in seconds. min_tokens: least limit of a pass, and its unit, in tokens. strict:
    sizes of passes must not depend on the clock.
    """

    def __init__(
        self, max_itl: float, ranks: TPGroup, min_tokens: int = MIN_PASS_TOKENS, *, strict: bool = False
    ) -> None:
        self._max_itl = max_itl
        self._ranks = ranks
        self._min_tokens = min_tokens
        self._strict = strict
        self._rates: dict[str, float] = {}
        """Seconds per token in the latest pass of each tier."""
        self._texts_wait = False
        self._deadline = 0.0

    def begin(self, running: bool, step_seconds: float = 0.0) -> None:
        """Begin the interval before a step. running: whether sequences wait for it. step_seconds: time of a step."""
        self._texts_wait = running and not self._strict
        self._deadline = perf_counter() + self._max_itl - step_seconds

    def grant(self, tier: str, tokens: int) -> int:
        """Return the tokens granted to a pass of `tier`: all `tokens`, or the part that time allows before a step."""
        if self._texts_wait:
            time = perf_counter()
            rate = self._rates.get(tier)
            affordable = FIRST_PASS_TOKENS if rate is None else int((self._deadline - time) / rate)
            pass_tokens = max(self._min_tokens, affordable // self._min_tokens * self._min_tokens)
            tokens = self._ranks.broadcast(min(tokens, pass_tokens))
        return tokens

    def record_pass(self, tier: str, tokens: int, seconds: float) -> None:
        """Record the seconds of a pass."""
        self._rates[tier] = seconds / tokens

    def has_time(self) -> bool:
        """Whether there is time for another part of a prompt before the next step."""
        return self._ranks.broadcast(perf_counter() < self._deadline)


class PacedPasses:
    """Prefill passes over one prompt, or those of a draft between two steps, as a pacer grants them.

    Between two parts of a pass, parts of other prompts' passes may run.
    """

    def __init__(self, pacer: PrefillPacer) -> None:
        self._pacer = pacer
        self._tier = ""
        self._tokens = 0
        self._seconds = 0.0

    def grant(self, tier: str, tokens: int) -> int:
        """End the previous pass, and return the tokens granted to the next. This method is a `speculation.Grant`."""
        self.end()
        self._tier, self._tokens, self._seconds = tier, self._pacer.grant(tier, tokens), 0.0
        return self._tokens

    def record(self, seconds: float) -> None:
        """Record the seconds of a part of the latest granted pass."""
        self._seconds += seconds

    def has_time(self) -> bool:
        """Whether there is time for another pass before the next step."""
        return self._pacer.has_time()

    def end(self) -> None:
        """Record the seconds of the latest granted pass with the pacer, if there was one."""
        if self._tokens:
            self._pacer.record_pass(self._tier, self._tokens, self._seconds)
        self._tokens = 0

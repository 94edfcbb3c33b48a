"""Cadence: when to look for n-grams in the text, and when to weigh plans. Each takes its part of the time.

Behind short prompts a step takes a third of a millisecond, and weighing plans takes as long. While plain decoding is
best, the text is only listened to, which takes little. Time that one text has left goes over to the next of its kind.
"""

from __future__ import annotations

from triforce.planner.planner_config import CONFIG

Kept = tuple[float, float, float]
"""See `Cadence.kept`."""

FIRST_THOUGHTS = 4  # of a batch, until when they follow each other sooner


class Cadence:
    """The cadence of one batch."""

    def __init__(self) -> None:
        self.elapsed = self.listen_at = self.think_at = 0.0  # seconds of decoding
        self._thoughts = self._heard = 0
        self._soonest = 0.0  # that plans may be weighed again, whatever n-grams foretell

    def due(self, plain: bool) -> bool:
        """Whether it is time: to think, or while decoding is plain to listen."""
        return self.elapsed >= (min(self.listen_at, self.think_at) if plain else self.think_at)

    def heard(self, hits: int, seconds: float) -> None:
        """Note tokens that n-grams predicted; hearing of them took so many seconds."""
        self._heard += hits
        self.listen_at = self.elapsed + CONFIG.listen_ratio * seconds
        if self._heard >= CONFIG.heard_tokens:
            self.think_at = min(self.think_at, max(self.elapsed, self._soonest))

    def thought(self, seconds: float) -> None:
        """Note that weighing plans took so many seconds."""
        self._thoughts, self._heard = self._thoughts + 1, 0
        sooner = min(1.0, self._thoughts / FIRST_THOUGHTS)
        self.think_at = self.elapsed + CONFIG.think_ratio * seconds * sooner
        self._soonest = self.elapsed + CONFIG.think_ratio * seconds / FIRST_THOUGHTS

    def resume(self, listen_in: float, think_in: float) -> None:
        """Go on where a text of the kind ended: see `kept`."""
        self.listen_at, self.think_at, self._thoughts = listen_in, think_in, FIRST_THOUGHTS

    def kept(self, plain: float) -> Kept:
        """Return what the next text of the kind goes on with: seconds of a plain step, and until each is due."""
        return plain, max(0.0, self.listen_at - self.elapsed), max(0.0, self.think_at - self.elapsed)

"""When a pilot listens to the text, weighs some plans, and weighs all of them: each takes its share of the time.

Where plain text goes on as such, plans are weighed when the text told enough of itself. What that takes is little, but
so is what a step takes behind a short prompt.
"""

from __future__ import annotations

WORTH = 100.0  # times the time that weighing plans takes is spent until the next thought
LISTEN = 200.0  # and that listening takes, where nothing else was done
PATIENT = 4  # times plans were weighed in a batch until then: its first thoughts follow sooner
SOMETIMES = 4  # thoughts for one that weighs all plans, with other budgets, too
TOLD = 16  # tokens that guesses from a plain text have to tell until they are weighed
IN_VAIN = 4  # times that, at most, after as many times in vain
QUIET = 4  # times as long until it is listened to again, at most, after as many texts of the kind that told nothing

Kept = tuple[float, float, int, int]
"""See `Cadence.kept`."""


class Cadence:
    """Of one batch; the parameters are what `kept` says."""

    def __init__(self, listen: float = 0.0, review: float = 0.0, vain: int = 1, quiet: int = 1) -> None:
        self.now, self.next = 0.0, listen
        """Seconds of decoding so far, and those at which it is time to listen."""
        self._review, self._vain, self._quiet = review, vain, quiet
        self._weighed = self._told = 0
        self._places = self._tokens = 0  # that were listened to, and that these told, in all

    @property
    def reviews(self) -> bool:
        """Whether it is time to weigh all plans, whatever the text told."""
        return self.now >= self._review

    def hears(self, places: int, tokens: int) -> bool:
        """At so many places the text told so many of its tokens; whether that is enough to weigh guesses from it."""
        self._told += tokens
        self._places, self._tokens = self._places + places, self._tokens + tokens
        return self._told >= TOLD * self._vain

    def listened(self, seconds: float) -> None:
        """That is what it took."""
        self.next = self.now + LISTEN * seconds * (1 if self._repeats else self._quiet)

    def weighed(self, seconds: float, told: bool, widely: bool, in_vain: bool) -> None:
        """Plans were weighed, which took so long, `widely` if all; `in_vain` if plain decoding is best."""
        self._weighed, self._told = self._weighed + 1, 0
        self._vain = min(self._vain + told, IN_VAIN) if in_vain else 1
        pause = WORTH * seconds * min(1.0, self._weighed / PATIENT)
        if widely:
            self._review = self.now + SOMETIMES * (WORTH * seconds if in_vain else pause)
        if not (widely and in_vain):  # else it goes on as after listening
            self.next = self.now + pause

    def hurry(self) -> None:
        """The next thought is due, and it is no beginning any more."""
        self.next, self._weighed = self.now, max(self._weighed, PATIENT)

    def kept(self) -> Kept:
        """What the next text of the kind goes on with, as this one was plain to its end.

        Seconds until it is listened to, and until all plans are weighed; how often guesses were weighed in vain, and
        how many texts told next to nothing, plus 1 each.
        """
        review = max(0.0, self._review - self.now)
        if self._repeats:
            return 0.0, review, self._vain, 1
        return max(0.0, self.next - self.now), review, self._vain, min(self._quiet + 1, QUIET)

    @property
    def _repeats(self) -> bool:
        """Whether the text told so much of itself that guesses from it may pay soon, if they do not yet."""
        return self._tokens >= max(TOLD, self._places)

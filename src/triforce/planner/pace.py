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


class Pace:
    """Of one batch. `review`: the seconds of decoding until all plans are weighed; `vain`: see `kept`."""

    def __init__(self, review: float = 0.0, vain: int = 1) -> None:
        self.now = self.next = 0.0
        """Seconds of decoding so far, and those at which it is time to listen."""
        self._review, self._vain = review, vain
        self._weighed = self._told = 0

    @property
    def reviews(self) -> bool:
        """Whether it is time to weigh all plans, whatever the text told."""
        return self.now >= self._review

    def hears(self, tokens: int) -> bool:
        """The text told so many more of its tokens; whether that is enough to weigh guesses from it."""
        self._told += tokens
        return self._told >= TOLD * self._vain

    def listened(self, seconds: float) -> None:
        """That is what it took."""
        self.next = self.now + LISTEN * seconds

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

    def kept(self) -> tuple[float, int]:
        """What the next text of the kind goes on with: seconds until a review, and how often it was in vain, plus 1."""
        return max(0.0, self._review - self.now), self._vain

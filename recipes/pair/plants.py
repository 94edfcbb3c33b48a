"""Plants repetitions in windows of text, so that look-up heads form early, reach far, and stop in time.

Copies and records divide a window into an early and a late part; the late part repeats tokens of the early part. In
windows of distant pieces (see batches.py) the parts are up to `span` positions apart. Echoes are short and near, and
loops are a passage that repeats itself at once. Shapes: W tokens of a window.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

Plant = Callable[[np.ndarray, np.ndarray, np.random.Generator], None]
"""Function that changes tokens of a window in place, and their marks: 1 for a label, 0 for no loss, or `AVOIDED`."""

AVOIDED = -1
"""Mark of a token whose probability the loss lowers."""

MIN_COPY = 12
"""Least tokens of a copied span."""
MAX_COPY = 256
MAX_ECHO = 32
"""Most tokens of an echo."""
ECHO_REACH = 384
"""Most tokens between a passage and its echo."""
ECHO_SPACING = 48
"""Tokens per echo."""
FIRST_ECHO = 32
"""First position of an echo or a loop."""
MAX_LOOP_PERIOD = 40
"""Most tokens of one round of a loop."""
MEAN_LOOP_TAIL = 8
"""Mean tokens of a loop after its second round."""
LOOP_SPACING = 64
"""Tokens per loop."""
MIN_ALLOWED_REPEAT = 4
"""Tokens that may always be repeated, even in a loop with a shorter period."""
COPIED_SHARE = 0.6
"""Share of the late part that copies fill: most of it, so that a row with copies teaches much."""
TEMPLATES = (
    "\nThe {thing} of {name} is {value}.\n",
    "\n{name}'s {thing} is {value}.\n",
    "\n{thing} of {name}: {value}\n",
)
THINGS = ("secret number", "code", "key", "number", "address", "price", "password", "weight", "account", "score")


def plant_copies(window_W: np.ndarray, marks_W: np.ndarray, rng: np.random.Generator) -> None:
    """Fill much of the late part with spans of the early part, in any order. One early part in four is shuffled."""
    middle = len(window_W) // 2
    end = len(window_W)
    if rng.random() < 0.25:
        rng.shuffle(window_W[:middle])
        marks_W[:middle] = False
    at = middle
    while at < end - MIN_COPY:
        length = int(min(np.exp(rng.uniform(np.log(MIN_COPY), np.log(MAX_COPY))), end - at, middle))
        start = int(rng.integers(0, middle - length + 1))
        window_W[at : at + length] = window_W[start : start + length]
        marks_W[at : at + 1] = False
        at += length  # then a stretch of the window's own text follows
        at += int(length * rng.uniform(0, 2 * (1 - COPIED_SHARE) / COPIED_SHARE))


def plant_echoes(window_W: np.ndarray, marks_W: np.ndarray, rng: np.random.Generator) -> None:
    """Repeat short recent passages. Only the tokens after an echo have labels, so the model learns that echoes end.

    A model that has seen only repetitions that continue does not end its own: at a low temperature it generates loops
    (LOG.md).
    """
    starts = rng.integers(FIRST_ECHO, len(window_W), len(window_W) // ECHO_SPACING)
    for at in np.sort(starts):
        length = min(int(np.exp(rng.uniform(np.log(3), np.log(MAX_ECHO)))), len(window_W) - at)
        back = int(rng.integers(length, min(at, ECHO_REACH) + 1))
        window_W[at : at + length] = window_W[at - back : at - back + length]
        marks_W[at : at + length] = False


def plant_loops(window_W: np.ndarray, marks_W: np.ndarray, rng: np.random.Generator) -> None:
    """Plant short loops of more than two rounds, so that the model learns to end a loop before its third round.

    The tokens of the third round are marked `AVOIDED`. This is unlikelihood training (Welleck et al. 2020) on planted
    instead of sampled repetitions.
    """
    for at in np.sort(rng.integers(FIRST_ECHO, len(window_W), len(window_W) // LOOP_SPACING)):
        back = int(np.exp(rng.uniform(np.log(1), np.log(MAX_LOOP_PERIOD))))
        length = min(int(back + rng.geometric(1 / MEAN_LOOP_TAIL)), len(window_W) - at)
        window_W[at : at + length] = np.resize(window_W[max(0, at - back) : at], length)
        marks_W[at : at + length] = False
        marks_W[at + max(back, MIN_ALLOWED_REPEAT) : at + length] = AVOIDED


@dataclass(frozen=True)
class Records:
    """Sentences that give numbers to names in the early part, and repeat the same sentences in the late part."""

    tokenizer: Tokenizer
    names: list[str]

    @staticmethod
    def of(tokenizer: Tokenizer) -> Records:
        """Return records whose names are the capitalised words in the vocabulary."""
        words = sorted(word[1:] for word in tokenizer.get_vocab() if re.fullmatch("Ġ[A-Z][a-z]{3,}", word))
        return Records(tokenizer, words or ["Ada", "Bob", "Cid", "Dot"])

    def __call__(self, window_W: np.ndarray, marks_W: np.ndarray, rng: np.random.Generator) -> None:
        """Replace tokens of the window in place. Only the numbers in the late part have labels."""
        middle = len(window_W) // 2
        end = len(window_W)
        count = max(1, min(24, end // 96))
        asked = [self._record(rng) for _ in range(count)]
        size = max(len(cue) + len(value) for cue, value in asked)
        for start, part_end, answers in ((0, middle, False), (middle, end, True)):
            slots = rng.permutation(max(0, part_end - start) // size)[: len(asked)]
            for slot, (cue, value) in zip(slots * size + start, asked, strict=False):
                stop = slot + len(cue) + len(value)
                window_W[slot:stop] = [*cue, *value]
                marks_W[slot:stop] = False
                marks_W[stop - len(value) : stop] = answers

    def _record(self, rng: np.random.Generator) -> tuple[list[int], list[int]]:
        """Return the tokens of a sentence up to its number, and the tokens from the number on."""
        words = {"thing": str(rng.choice(THINGS)), "name": str(rng.choice(self.names)), "value": ""}
        cue, tail = str(rng.choice(TEMPLATES)).format_map(words | {"value": "\0"}).split("\0")
        number = "".join(map(str, rng.integers(0, 10, 5)))
        cue_ids = self.tokenizer.encode(cue.rstrip(" "), add_special_tokens=False).ids
        token_ids = self.tokenizer.encode(cue + number + tail, add_special_tokens=False).ids
        return token_ids[: len(cue_ids)], token_ids[len(cue_ids) :]

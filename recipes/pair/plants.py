"""Repetitions planted in windows of text, so that heads which look things up form early, reach far, and let go.

Copies and records cut a window in two parts: what is planted in the early part comes back in the late one. In windows
made of distant pieces (see batches.py) the parts lie up to the whole span of positions apart. Echoes are short and
near. Shapes: W tokens of a window.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

Plant = Callable[[np.ndarray, np.ndarray, np.random.Generator], None]
"""Changes the tokens of a window in place, and what is known of each: it counts (1), it does not (0), or `AVOIDED`."""

AVOIDED = -1

FEWEST, MOST = 12, 256  # tokens of a copied span
ECHO_MOST, ECHO_REACH, ECHO_EVERY, ECHOES_FROM = 32, 384, 48, 32  # tokens: longest, furthest, one in this number, first
LOOP_REACH, LOOP_MEAN, LOOP_EVERY = 40, 8, 64  # tokens of a circle at most; beyond its second round; one in this number
ROUND = 4  # tokens that may be said again whatever the circle
COPIED = 0.6  # of the late part, so that a row with copies teaches as much as it can
TEMPLATES = (
    "\nThe {thing} of {name} is {value}.\n",
    "\n{name}'s {thing} is {value}.\n",
    "\n{thing} of {name}: {value}\n",
)
THINGS = ("secret number", "code", "key", "number", "address", "price", "password", "weight", "account", "score")


def plant_copies(window_W: np.ndarray, known_W: np.ndarray, rng: np.random.Generator) -> None:
    """Fills much of the late part with spans of the early one, in any order; one early part in four is shuffled."""
    middle = len(window_W) // 2
    end = len(window_W)
    if rng.random() < 0.25:
        rng.shuffle(window_W[:middle])
        known_W[:middle] = False
    at = middle
    while at < end - FEWEST:
        length = int(min(np.exp(rng.uniform(np.log(FEWEST), np.log(MOST))), end - at, middle))
        start = int(rng.integers(0, middle - length + 1))
        window_W[at : at + length] = window_W[start : start + length]
        known_W[at : at + 1] = False
        at += length  # the window's own text goes on, for about as long as `COPIED` leaves
        at += int(length * rng.uniform(0, 2 * (1 - COPIED) / COPIED))


def plant_echoes(window_W: np.ndarray, known_W: np.ndarray, rng: np.random.Generator) -> None:
    """Says a few of the last tokens again here and there, and counts only what follows: repetitions end.

    A model that has seen repetitions go on alone does not leave its own: sampled at a low temperature, it goes round
    in circles (LOG.md).
    """
    starts = rng.integers(ECHOES_FROM, len(window_W), len(window_W) // ECHO_EVERY)
    for at in np.sort(starts):
        length = min(int(np.exp(rng.uniform(np.log(3), np.log(ECHO_MOST)))), len(window_W) - at)
        back = int(rng.integers(length, min(at, ECHO_REACH) + 1))
        window_W[at : at + length] = window_W[at - back : at - back + length]
        known_W[at : at + length] = False


def plant_loops(window_W: np.ndarray, known_W: np.ndarray, rng: np.random.Generator) -> None:
    """Goes round in small circles here and there: a model must find its way out, and not into a third round.

    The tokens of that round are marked `AVOIDED`: unlikelihood training (Welleck et al. 2020), on repetitions that are
    planted instead of sampled.
    """
    for at in np.sort(rng.integers(ECHOES_FROM, len(window_W), len(window_W) // LOOP_EVERY)):
        back = int(np.exp(rng.uniform(np.log(1), np.log(LOOP_REACH))))
        length = min(int(back + rng.geometric(1 / LOOP_MEAN)), len(window_W) - at)
        window_W[at : at + length] = np.resize(window_W[max(0, at - back) : at], length)
        known_W[at : at + length] = False
        known_W[at + max(back, ROUND) : at + length] = AVOIDED


@dataclass(frozen=True)
class Records:
    """Sentences that give each of some names a number, scattered over the early part and asked for in the late one."""

    tokenizer: Tokenizer
    names: list[str]

    @staticmethod
    def of(tokenizer: Tokenizer) -> Records:
        """Names are the capitalised words among the tokens."""
        words = sorted(word[1:] for word in tokenizer.get_vocab() if re.fullmatch("Ġ[A-Z][a-z]{3,}", word))
        return Records(tokenizer, words or ["Ada", "Bob", "Cid", "Dot"])

    def __call__(self, window_W: np.ndarray, known_W: np.ndarray, rng: np.random.Generator) -> None:
        """Replaces the tokens of the window in place; only the numbers asked for count, not those given."""
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
                known_W[slot:stop] = False
                known_W[stop - len(value) : stop] = answers

    def _record(self, rng: np.random.Generator) -> tuple[list[int], list[int]]:
        """The tokens before a number, and those of the number with what ends the sentence."""
        words = {"thing": str(rng.choice(THINGS)), "name": str(rng.choice(self.names)), "value": ""}
        cue, tail = str(rng.choice(TEMPLATES)).format_map(words | {"value": "\0"}).split("\0")
        number = "".join(map(str, rng.integers(0, 10, 5)))
        cue_ids = self.tokenizer.encode(cue.rstrip(" "), add_special_tokens=False).ids
        token_ids = self.tokenizer.encode(cue + number + tail, add_special_tokens=False).ids
        return token_ids[: len(cue_ids)], token_ids[len(cue_ids) :]

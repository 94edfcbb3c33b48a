"""Texts with positions to measure: prose or code as it stands, a passage that comes again, numbers asked for.

Every text is given, none is generated: each position is scored after the text's own tokens (teacher forcing).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from triforce.bench.prompts import CUE, Decode, Encode, has_digit, needles
from triforce.errors import RequestError


class Span(NamedTuple):
    """Positions [start, stop) of a text that one verification scores; they are `measured`, or only read."""

    start: int
    stop: int
    measured: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """A text, whose prompt ends where the first span starts; the spans follow one another."""

    name: str
    source: str
    ids: list[int]
    spans: list[Span]

    @property
    def prompt(self) -> int:
        return self.spans[0].start


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens of the prompt, of what is measured after it, and of one verification."""

    context: int
    positions: int
    width: int


def plain(name: str, source: str, ids: list[int], size: Size) -> Workload:
    """A text as it stands."""
    stop = size.context + size.positions
    return Workload(name, source, _start(source, ids, stop), _strides(size.context, stop, size.width))


def copy(source: str, ids: list[int], size: Size) -> Workload:
    """A passage from the first quarter of the context comes again, word for word, at its end."""
    source_place = size.context // 4
    again = _start(source, ids, source_place + CUE + size.positions)[source_place:]
    text = _start(source, ids, size.context - CUE) + again
    return Workload("copy", source, text, _strides(size.context, len(text), size.width))


def needle(source: str, ids: list[int], size: Size, encode: Encode, decode: Decode) -> Workload:
    """Numbers given in the first half of the context are asked for, in another order, at its end.

    The questions are read, the numbers measured: none is in sight of the latest tokens, nor given twice.
    """
    facts = needles(encode, decode)
    hidden = sum(len(cue + answer) for cue, answer in facts)
    gap = (size.context // 2 - hidden) // len(facts)
    text = list[int]()
    if gap <= 0:
        raise RequestError(f"a context of {size.context} tokens is too short to hide numbers in; take {4 * hidden}")
    hay = _start(source, ids, size.context - hidden)
    for i, (cue, answer) in enumerate(facts):
        text += hay[i * gap : (i + 1) * gap] + cue + answer
    text += hay[len(facts) * gap :]
    spans = list[Span]()
    read = len(text)
    for cue, answer in Random(1).sample(facts, len(facts)):
        text += cue + answer
        first_place = len(text) - len(answer)
        digits = sum(has_digit(decode([token])) for token in answer)
        spans += [Span(read, first_place, False), *_strides(first_place, read := first_place + digits, size.width)]
    return Workload("needle", source, text[:read], spans)


def _strides(start: int, stop: int, width: int) -> list[Span]:
    return [Span(at, min(at + width, stop), True) for at in range(start, stop, width)]


def _start(source: str, ids: list[int], length: int) -> list[int]:
    if len(ids) < length:
        raise RequestError(f"{source} has {len(ids)} tokens, {length} are needed; take a longer text or less --context")
    return ids[:length]

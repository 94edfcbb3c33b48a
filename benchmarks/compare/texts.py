"""Prompts for engines on a GGUF file: places in books, as they are or with a question behind them.

Those are taken that all engines continue with little repetition, of the text itself or of its prompt: lookups of all
engines live on both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.compare.processes import EngineTrouble
from triforce.bench.prompts import Sources
from triforce.errors import RequestError
from triforce.interface.repeated_grams import LOOP_SHARE, repeated_share

QUESTIONS = (
    "Who takes part in what is told here, and what does each of them want?",
    "What has happened up to this point, in the order in which it happened?",
    "Where does all of this take place, and how is it described?",
)
WORKLOADS = ("books", "questions")
PLACES = 6
"""Places that are tried."""

Writer = Callable[[list[int]], list[int]]
"""Makes the greedy text of a prompt. Raises EngineTrouble."""


@dataclass(frozen=True)
class ChosenText:
    """A prompt, the place that it is of, and the share that repeats in the text of each engine that was asked."""

    ids: list[int]
    place: int
    repeats: Mapping[str, float]
    all_asked: bool
    """True if all engines were asked: no further one is, once a text of one repeats itself too much."""

    @property
    def order(self) -> tuple[bool, float]:
        """Return the sort key, least for the best prompt."""
        return not self.all_asked, max(self.repeats.values(), default=0.0)

    @property
    def enough(self) -> bool:
        return self.all_asked and self.order[1] < LOOP_SHARE


def choose(
    sources: Sources, workloads: Sequence[str], length: int, writers: Mapping[str, Writer]
) -> dict[str, ChosenText]:
    """Return for each workload the first prompt whose texts hardly repeat themselves, or else the least repetitive one.

    An engine that fails is not asked again. Raises RequestError.
    """
    texts: dict[str, ChosenText] = {}
    able = dict(writers)
    for place in range(PLACES):
        for workload in workloads:
            if workload not in texts or not texts[workload].enough:
                ids = prompt(sources, workload, length, place)
                tried = _try_prompt(ids, place, able)
                texts[workload] = min([texts[workload], tried] if workload in texts else [tried], key=_order)
    return texts


def _order(text: ChosenText) -> tuple[bool, float]:
    return text.order


def _try_prompt(ids: list[int], place: int, able: dict[str, Writer]) -> ChosenText:
    repeats: dict[str, float] = {}
    for engine, write in list(able.items()):
        try:
            repeats[engine] = repeated_share(write(ids), ids)
        except EngineTrouble:  # it is told when its settings are tried
            del able[engine]
            continue
        if repeats[engine] >= LOOP_SHARE:
            break
    return ChosenText(ids, place, repeats, len(repeats) == len(able))


def prompt(sources: Sources, workload: str, length: int, place: int) -> list[int]:
    """Return a prompt of `length` tokens, from one of the places spread over the books. Raises RequestError."""
    book = sources.prose
    question = QUESTIONS[place % len(QUESTIONS)]
    end = sources.encode(f"\n\nQuestion: {question}\nAnswer:") if workload == "questions" else []
    if not 0 < length - len(end) <= len(book):
        raise RequestError(
            f"prompts of {length:,} tokens cannot be made of texts of {len(book):,} and a question of {len(end)}; "
            "give --texts more or longer books, or other --contexts"
        )
    start = place * max(0, len(book) - length) // PLACES
    return book[start : start + length - len(end)] + end

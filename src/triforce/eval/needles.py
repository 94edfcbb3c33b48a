"""Needles in a haystack: numbers inserted somewhere in a long text, and asked for at its end.

A haystack has a needle at each depth. Needles have different names and otherwise the same words, so the model must
find the right one. One prefill of a haystack serves all its questions: the cache is rewound after each.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triforce.eval.context import EvalContext, Text
from triforce.eval.scoring import full_view, greedy, prefill
from triforce.eval.time_budget import ReadingForecast
from triforce.tables import Table, percent, tokens

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
QUESTION_TOKENS, ANSWER_TOKENS = 12, 8
"""Approximate tokens of a question and of an answer."""

MAX_FACTOR = 4
"""Greatest factor by which short haystacks, which are cheap, outnumber the longest ones."""

NAMES = (
    *("Marlow", "Harker", "Ishmael", "Dorothea", "Pierre", "Emma", "Gulliver", "Crusoe", "Portia", "Hamlet"),
    *("Silas", "Ruth", "Jasper", "Clara", "Edmund", "Agnes", "Walter", "Helen", "Victor", "Laura"),
)


@dataclass(frozen=True, slots=True)
class Haystack:
    """A text with needles. questions: for each needle its depth, question, number, and token count of the answer."""

    ids_N: Tensor
    questions: list[tuple[float, Tensor, str, int]]


def measure(subject: EvalContext) -> dict[str, Any]:
    """Count right answers by length and depth. `confused` answers have the number of another needle."""
    rng = random.Random(subject.config.seed)
    windows = subject.windows(subject.config.longest_window, max_windows=2)
    cells: dict[tuple[int, float], list[tuple[bool, bool]]] = {}
    turns = [(size, n) for size in lengths(subject) for n in range(_haystack_count(subject, size))]
    for length, n in subject.with_progress(turns):
        haystack = build_haystack(subject, windows[n % len(windows)], length, rng)
        for depth, *answers in _answers(subject, haystack) if haystack else ():
            cells.setdefault((length, depth), []).append((answers[0], answers[1]))
    if not cells:
        return {"skipped": "no text is long enough to hide needles in"}
    return {"cells": [_cell(length, depth, answers) for (length, depth), answers in sorted(cells.items())]}


def _cell(length: int, depth: float, answers: list[tuple[bool, bool]]) -> dict[str, Any]:
    right, confused = (sum(column) for column in zip(*answers, strict=True))
    return {"length": length, "depth": depth, "asked": len(answers), "right": right, "confused": confused}


def lengths(subject: EvalContext) -> list[int]:
    """Return lengths of haystacks with question and answer: 2K and its doubles.

    Contexts below 8K begin with a quarter of the context.
    """
    longest_length = subject.config.longest_window
    shortest = min(2048, longest_length // 4)
    return [shortest << n for n in range((longest_length // shortest).bit_length())]


def _haystack_count(subject: EvalContext, length: int) -> int:
    config = subject.config
    return max(1, min(MAX_FACTOR * config.haystacks, config.haystacks * config.span // length))


def build_haystack(subject: EvalContext, text: Text, length: int, rng: random.Random) -> Haystack | None:
    """Return a haystack of `length` tokens with its longest question and answer; None if the needles do not fit."""
    needles = []
    questions = []
    for depth, name in zip(DEPTHS, rng.sample(NAMES, len(DEPTHS)), strict=True):
        number = str(rng.randint(10_000, 99_999))
        question = f"\nThe secret number of {name} is"
        answer = f" {number}."
        needles.append(_ids(subject, f"{question}{answer}\n"))
        questions.append((depth, _ids(subject, question), number, len(_ids(subject, answer))))
    hay_tokens = length - sum(map(len, needles)) - max(len(question) + count for _, question, _, count in questions)
    if hay_tokens < sum(map(len, needles)) or len(text.ids_N) < hay_tokens:
        return None
    hay_N = text.ids_N[rng.randint(0, len(text.ids_N) - hay_tokens) :]
    cuts = [round(depth * hay_tokens) for depth in DEPTHS]
    hay_parts = [hay_N[start:stop] for start, stop in zip([0, *cuts], cuts, strict=False)]
    parts = [part for hay_part, needle in zip(hay_parts, needles, strict=True) for part in (hay_part, needle)]
    return Haystack(torch.cat(parts), questions)


def _answers(subject: EvalContext, haystack: Haystack) -> list[tuple[float, bool, bool]]:
    """Return for each needle its depth, whether the answer is its number, and whether it is another needle's."""
    longest = max(len(question) + count for _, question, _, count in haystack.questions)
    view = full_view(subject.target, len(haystack.ids_N) + longest)
    prefill(subject.target, view, haystack.ids_N)
    answers = []
    for depth, question_T, number, count in haystack.questions:
        answer = subject.tokenizer.decode(greedy(subject.target, view, question_T, count))
        digits = "".join(re.findall(r"^\s*(\d+)", answer))
        other_numbers = {needle_number for _, _, needle_number, _ in haystack.questions} - {number}
        answers.append((depth, digits == number, digits in other_numbers))
    return answers


def _ids(subject: EvalContext, text: str) -> Tensor:
    return torch.tensor(subject.tokenizer.encode(text, add_special=False), device=subject.target.device)


def seconds(subject: EvalContext, forecast: ReadingForecast) -> float:
    pace = forecast.target
    total = 0.0
    for size in lengths(subject):
        answer = pace.reading_seconds(size, size - QUESTION_TOKENS) + pace.step_seconds(ANSWER_TOKENS, size)
        total += _haystack_count(subject, size) * (pace.reading_seconds(size) + len(DEPTHS) * answer)
    return total


def tables(result: dict[str, Any]) -> list[Table]:
    cells = {(cell["length"], cell["depth"]): cell for cell in result["cells"]}
    rows = []
    for length in sorted({length for length, _ in cells}):
        depth_cells = [cells[length, depth] for depth in DEPTHS]
        right, asked, confused = (
            sum(cell[count_name] for cell in depth_cells) for count_name in ("right", "asked", "confused")
        )
        depth_shares = [percent(cell["right"] / cell["asked"]) for cell in depth_cells]
        rows.append([tokens(length), *depth_shares, percent(right / asked), f"{asked}", percent(confused / asked)])
    note = (
        f'Each haystack has {len(DEPTHS)} needles such as "The secret number of Marlow is 48213.", with different '
        "names. The model completes the start of one needle greedily. Depth 0 is the beginning of the text. Another's: "
        "answers with the number of another needle."
    )
    header = ["length", *(f"depth {depth:.0%}" for depth in DEPTHS), "all", "asked", "another's"]
    return [Table("Needles in a haystack", note, header, rows)]

"""Every number of an evaluation: a model's context decides how far it goes, `longest` how much a quick one reads."""

from __future__ import annotations

from dataclasses import dataclass

SPAN = 32_768
QUICK = (8_192, 4_096, 2_048, 1_024, 512, 256)
"""Longest readings of a quick evaluation: what there is time for."""


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """Lengths and positions are tokens.

    span: read of a text at once. deepest: how far the longest readings go. windows: spans of each kind of text at
    least, where the texts have as many; most: at most, the longest. recent: what the cut model sees in `gain`; stride:
    its windows move by so much. block: tokens whose mean gain is one observation. haystacks: of the longest span; short
    ones get up to four times as many. copies: spans that are repeated at each distance. judged: tokens of a span where
    draft and target are compared. prompts, new_tokens: sampled continuations.
    """

    span: int
    deepest: int
    windows: int = 4
    most: int | None = None
    recent: int = 2048
    stride: int = 256
    block: int = 512
    haystacks: int = 3
    copies: int = 8
    judged: int = 1024
    prompts: int = 20
    new_tokens: int = 512
    seed: int = 1

    @property
    def far(self) -> range:
        """The positions where far context should help: 16K to 24K of 32K."""
        return range(self.span // 2, self.span * 3 // 4)


def plan(context: int, max_context: int, longest: int | None = None) -> EvalConfig:
    """What to measure on a model of `context` positions, of which at most `max_context` are to be used.

    longest: of the readings of a quick evaluation, which are also few.
    """
    quick = longest is not None
    deepest = min(context, max_context, longest or context)
    span = min(SPAN, deepest)
    recent = min(2048, max(32, span // 4))
    sizes = {"recent": recent, "stride": recent // 8, "block": recent // 4, "judged": min(1024, span // 8)}
    few = {"windows": 1, "most": 2, "haystacks": 1, "copies": 2, "prompts": 8} if quick else {}
    return EvalConfig(span, deepest, new_tokens=min(128 if quick else 512, span // 8), **sizes, **few)

"""Recorded traces of acceptance, and proposals of plans on them (see benchmarks/acceptance_traces.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from triforce.planner import Plan
from triforce.speculation import NgramProposer
from triforce.speculation.ngram import MIN_MATCH_ABOVE_DRAFT, MIN_MATCH_ALONE, PRIOR_COUNT, PROMPT_TAIL

FILE = Path(__file__).parents[2] / "data" / "acceptance_traces.npz"
TOKENS = 1024
ROLLED = 173  # positions between rows that replay one trace
MODELS = ("pair", "smollm2")

Token = tuple[bool, bool]
"""Whether a proposed token equals the text's, and whether it equals the retrieval tier's."""

Passed = Callable[[str, int, int], None]
"""Callback with a tier, the width of a pass or the tokens of a fused draft, and the rows."""


@dataclass(frozen=True)
class Trace:
    """One text: each tier's agreement at each of its positions."""

    name: str
    model: str
    prompt: int
    temperature: float
    facts: list[int]
    matches: list[int]
    hits: list[int]

    def match(self, position: int) -> tuple[int, int]:
        """Return the n-gram match at a position, from the prompt's last tokens on, and its hits."""
        return self.matches[position + PROMPT_TAIL], self.hits[position + PROMPT_TAIL]


@cache
def traces() -> dict[str, Trace]:
    """Return all traces by name: model, workload, tokens of the prompt, temperature, and text."""
    traces_by_name = {}
    with np.load(FILE) as file:
        for name, facts, grams in zip(file["names"], file["facts"], file["ngrams"], strict=True):
            model, _, prompt, temperature, _ = name.split()
            traces_by_name[str(name)] = Trace(
                str(name),
                model,
                int(prompt),
                float(temperature),
                facts.tolist(),
                *(column.tolist() for column in grams),
            )
    return traces_by_name


class Replay:
    """Rows of a trace under plans: `propose` makes one proposal of the full tier.

    passed: called for each pass. verdict: called with a tier, a row, and numbers of proposed and accepted tokens.
    """

    def __init__(self, trace: Trace, rows: int, passed: Passed, verdict: Callable[[str, int, int, int], None]) -> None:
        self.trace = trace
        self.passed = passed
        self.verdict = verdict
        self.positions = [0] * rows
        self.times = 1.0
        self._counts = {name: [[PRIOR_COUNT, PRIOR_COUNT] for _ in range(rows)] for name in ("draft", "ngram")}

    def propose(self, plan: Plan) -> list[int]:
        """Return the number of new tokens of each row."""
        self._tiers = plan.tiers
        self._gammas = (*plan.gammas, 1)
        self.times = dict(plan.budget_factors).popitem()[1] if plan.budget_factors else 1.0
        rows = range(len(self.positions))
        proposed = self._propose(len(plan.tiers) - 1, list(rows), [0] * len(rows))
        for b in rows:
            self.positions[b] += len(proposed[b])
        return [len(proposed[b]) for b in rows]

    def fact(self, b: int, offset: int) -> int:
        return self.trace.facts[(self.positions[b] + offset + ROLLED * b) % TOKENS]

    def _retrieved(self, b: int, offset: int) -> bool:
        return bool(self.fact(b, offset) & {0.5: 4, 1.0: 2, 2.0: 8}[self.times])

    def _propose(self, level: int, rows: list[int], offsets: list[int]) -> dict[int, list[Token]]:
        tier = self._tiers[level]
        gamma = self._gammas[level]
        if tier == "draft":
            self.passed("draft", gamma, len(rows))
            facts = {b: [self.fact(b, offsets[b] + i) for i in range(gamma)] for b in rows}
            return {b: [(bool(f & 1), bool(f & 16)) for f in facts[b]] for b in rows}
        if tier == "ngram":
            return self._look_up(level, rows, offsets)
        proposed: dict[int, list[Token]] = {b: [] for b in rows}
        while live := [b for b in rows if len(proposed[b]) < gamma]:
            at = [a + len(proposed.get(b, ())) for b, a in enumerate(offsets)]
            draft_tokens = self._propose(level - 1, live, at) if level else {b: [] for b in live}
            self.passed(tier, 1 + max(map(len, draft_tokens.values())), len(live))
            for b in live:
                proposed[b] += self._verified(tier, level, b, at[b], draft_tokens[b])
        return proposed

    def _verified(self, tier: str, level: int, b: int, at: int, draft_tokens: list[Token]) -> list[Token]:
        full = tier == "full"
        agreed = [token[0 if full else 1] for token in draft_tokens]
        accepted = agreed.index(False) if False in agreed else len(agreed)
        if level:
            name = self._drafter.pop(b, "ngram") if self._tiers[level - 1] == "ngram" else self._tiers[level - 1]
            self.verdict(name, b, len(draft_tokens), accepted)
            if name in self._counts:
                self._counts[name][b][0] += accepted
                self._counts[name][b][1] += accepted < len(draft_tokens) or not draft_tokens
        return [(full or self._retrieved(b, at + i), True) for i in range(accepted + 1)]

    def _look_up(self, level: int, rows: list[int], offsets: list[int]) -> dict[int, list[Token]]:
        """Propose by n-grams where they match, and by the draft below elsewhere."""
        self.passed("ngram", 1, len(rows))
        self._drafter: dict[int, str] = {}
        proposed = {}
        draft_rows = []
        gamma = self._gammas[level]
        for b in rows:
            match, hits = self.trace.match((self.positions[b] + offsets[b] + ROLLED * b) % TOKENS)
            least_match = float(MIN_MATCH_ABOVE_DRAFT if level else MIN_MATCH_ALONE)
            if level:
                ngram_rate, draft_rate = (
                    self._counts[name][b][0] / self._counts[name][b][1] for name in ("ngram", "draft")
                )
                least_match *= max(1, draft_rate / ngram_rate)
            count = min(gamma, NgramProposer.proposal_length(match)) if match >= least_match else 0
            proposed[b] = [(i < hits, i < hits and self._retrieved(b, offsets[b] + i)) for i in range(count)]
            if count == 0 and level:
                draft_rows.append(b)
        if draft_rows:
            proposed |= self._propose(level - 1, draft_rows, offsets)
            self._drafter |= dict.fromkeys(draft_rows, "draft")
        return proposed


@dataclass(frozen=True)
class Played:
    """Proposals of a plan up to some position: tokens of all rows, and passes by tier, width and rows."""

    tokens: int
    passes: Counter[tuple[str, int, int]]


@cache
def played(name: str, plan: Plan, rows: int, stops: tuple[int, ...]) -> list[Played]:
    """Return a fixed plan's proposals on a trace up to each of `stops`, positions of the first row."""
    passes: Counter[tuple[str, int, int]] = Counter()

    def passed(tier: str, width: int, live: int) -> None:
        passes[tier, width, live] += 1

    replay = Replay(traces()[name], rows, passed, lambda *_: None)
    positions = []
    for stop in stops:
        tokens = 0
        while replay.positions[0] < stop:
            tokens += sum(replay.propose(plan))
        positions.append(Played(tokens, passes.copy()))
        passes.clear()
    return positions


def fixed_plans(draft: bool, retrieval: bool, budgets: Sequence[tuple[tuple[int, float], ...]]) -> list[Plan]:
    """Return a grid of plans that a user might choose by hand."""
    plans = [Plan(("ngram", "full"), (gamma,)) for gamma in (4, 12)]
    if draft:
        plans += [Plan(("draft", "full"), (gamma,)) for gamma in (1, 2, 4, 6)]
        plans += [Plan(("draft", "ngram", "full"), (gamma, 8)) for gamma in (2, 4)]
    if retrieval:
        for factors in budgets:
            plans += [Plan(("retrieval", "full"), (gamma,), factors) for gamma in (3, 6, 12)]
            plans += [Plan(("ngram", "retrieval", "full"), (4, gamma), factors) for gamma in (6, 12)]
            lower = [(1, 4), (2, 6), (4, 6), (2, 12), (4, 12)] if draft else []
            plans += [Plan(("draft", "retrieval", "full"), gammas, factors) for gammas in lower]
    return plans

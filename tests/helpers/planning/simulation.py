"""One recorded text under the real controller, in a world whose costs are known. No clock is read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.helpers.planning.traces import ROLLED, TOKENS, Replay, Trace
from tests.helpers.planning.worlds import OUTLIER, World
from tests.helpers.simulated_tiers import steer
from triforce.kvcache import Budget, RetrievalConfig
from triforce.planner import CostModel, PlanController
from triforce.planner.forecast import Choice
from triforce.ragged import ints
from triforce.speculation import NgramProposer, SequenceState
from triforce.speculation.draft import Counters
from triforce.speculation.ngram import PROMPT_TAIL, STRIDE

USUAL = Budget(2048, adjustable=True)
STEP_SECONDS = 3e-6  # planner time between two proposals without a look at the clock
NOISE = 0.06  # standard deviation of the logarithm of a pass's seconds


class ReplayedView:
    """A retrieval view without pages, which computes the number of keys that it would read."""

    def __init__(self) -> None:
        self.setting = RetrievalConfig(USUAL)
        self.budget_factors: dict[int, float] = {}
        self.full = SimpleNamespace(pool=SimpleNamespace(offloaded=None))

    def budget(self, context: int) -> int:
        return self.setting.budget.of(context, self.budget_factors.get(context.bit_length(), 1.0))

    def keys_read(self, context: int, searched: int | None = None, budget: int | None = None) -> int:
        return min(budget or self.budget(context), context)


class ReplayedNgrams(NgramProposer):
    """An n-gram proposer with recorded matches."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(len(replay.positions))
        self.replay = replay
        self._at = [-PROMPT_TAIL] * len(replay.positions)

    def hindsight(self, prefix: SequenceState, b: int, compared_tokens: int) -> Iterator[tuple[int, int, bool]]:
        places = range(self._at[b], self.replay.positions[b] - compared_tokens + 1, STRIDE)
        for place in places:
            at = (place + ROLLED * b) % TOKENS if place >= 0 else place
            match, hits = self.replay.trace.match(at)
            yield match, min(hits, compared_tokens), place >= 0
        if places:
            self._at[b] = places[-1] + STRIDE


def keys_of(tier: str, lengths: Sequence[int], times: float) -> int:
    """Return the keys that a tier's pass reads for rows of `lengths`, with `times` the usual budget."""
    if tier == "retrieval":
        return sum(min(USUAL.of(length, times), length) for length in lengths)
    return sum(lengths) if tier == "full" else 0


class Simulation:
    """One text in one world under a controller with given costs."""

    def __init__(self, trace: Trace, world: World, costs: CostModel, seed: int = 0) -> None:
        rows = world.rows
        self.trace = trace
        self.world = world
        self.now = 0.0
        self.luck = 0.0
        self.generator = random.Random(f"{seed} {world.name} {trace.name}")
        self.replay = Replay(trace, rows, self._pass, self._verdict)
        self.prompt = world.keys * trace.prompt
        self.live_B = np.ones(rows, bool)
        self.plans = list[str]()
        full = SimpleNamespace(grain=16, lengths_B=ints([self.prompt] * rows))
        parts: list[Any] = [ReplayedNgrams(self.replay)]
        parts += [self._tier("draft", None)] if world.draft else []
        parts += [self._tier("retrieval", ReplayedView()), self._tier("full", full)]
        self.counters = {part.name: part.counters for part in parts}
        self.controller = PlanController(parts, costs, trace.temperature, clock=self._clock)
        self.controller.choose = self._weighed(self.controller.choose)  # type: ignore[method-assign]

    def rate(self, tokens: int) -> float:
        """Return tokens per second of all rows, until the first one has `tokens`, without the noise of passes.

        With noise, plain decoding alone would reach .74 of itself on the worst text of 64 tokens of a busy machine.
        """
        controller = self.controller
        emitted = 0
        while self.replay.positions[0] < tokens:
            prefix = self._prefix()
            self.now += STEP_SECONDS
            steer(controller, prefix, self.live_B, lambda: tokens - self.replay.positions[0])
            self.plans.append(controller.name)
            began = self.now
            new = sum(self.replay.propose(controller.plan))
            controller.observe(prefix.lengths_B.tolist(), new, self.now - began)
            emitted += new
        controller.close(self._prefix())
        return emitted / (self.now - self.luck)

    def _tier(self, name: str, cache: Any) -> Any:
        counters = Counters(len(self.live_B))
        return SimpleNamespace(name=name, gamma=1, below=None, level=0, counters=counters, cache=cache)

    def _prefix(self) -> SequenceState:
        return SequenceState(np.zeros((len(self.live_B), 1), np.int64), self.prompt + ints(self.replay.positions))

    def _weighed(self, choose: Callable[..., Choice]) -> Callable[..., Choice]:
        """Return `choose` with the simulated time of weighing plans."""

        def weighed(*how: Any) -> Choice:
            self.now += self.world.weighing
            return choose(*how)

        return weighed

    def _clock(self) -> float:
        self.now += self.world.thought
        return self.now

    def _pass(self, tier: str, width: int, rows: int) -> None:
        keys = keys_of(tier, self._prefix().lengths_B.tolist()[:rows], self.replay.times)
        expected_seconds = self.world.seconds(tier, width, rows, keys) * self.world.speed(self.replay.positions[0])
        took = expected_seconds * self.generator.lognormvariate(-(NOISE**2) / 2, NOISE)
        took *= OUTLIER if self.generator.random() < self.world.outliers else 1.0
        self.now += took
        self.luck += took - expected_seconds * self.world.outlier_factor
        self.counters[tier].record_passes(np.arange(len(self.live_B)) < rows, took, width)

    def _verdict(self, tier: str, b: int, offered: int, accepted: int) -> None:
        row_B = np.arange(len(self.live_B)) == b
        self.counters[tier].record_verdict(ints([offered]) * row_B, ints([accepted]) * row_B, row_B)

"""Seconds of forward passes: a roofline of two bounds, times what the passes that are nearest showed.

A component of a pass takes the longer of two times, that of its bytes and that of its operations (Williams et al.
2009): seconds = constant + sum of max(bytes / bandwidth, operations / rate), of the weights and of the KV. Bytes and
operations are known (`TierWork`), so widths that were never run are foretold. Kinds of passes that did run say how far
off that is; a shared factor, the machine's speed, says how fast it is now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from triforce.model.config import ModelConfig
from triforce.planner.planner_config import CONFIG

BALANCES = tuple(2 ** (step / 2) for step in range(2, 17))
"""Tokens of a pass from which bfloat16 weights are bound by operations: processors first, graphics cards last."""
OVERHEADS = (0.0, *(5e4 * 2**step for step in range(9)))
"""Bytes that could be read in the fixed time of a layer."""
OVERLAPS = 1.0, 8.0
"""Exponents: 1 where bytes are not read while operations run, 8 where they are, so that the longer of both counts."""
MACHINES = np.array(list(product(BALANCES, OVERHEADS, OVERLAPS)))
USUAL_MACHINE = 8.0, 4e5, 8.0
LEAST = 1e4  # bytes
AGE = 2048.0  # passes after which a kind that was not seen counts half
NEAR = 0.3  # squared octaves to a kind that ran, within which another kind is foretold well
WELL_KNOWN = 2.0  # passes of a kind
MOST_KINDS = 48  # of a tier
WIDEST = 1 << 30  # tokens
KEY_SCALE = 64.0
"""Keys below which their number hardly matters."""


@dataclass(frozen=True, slots=True)
class TierWork:
    """Work of a tier's passes, by its model: layers, bytes of its weights and of a token's KV, bytes of a number.

    group: query heads of a KV head. sequential: a fused draft, which reads all for each of its tokens.
    """

    layers: int = 8
    weights: float = 1e7
    key: float = 1e3
    number: float = 2.0
    group: int = 1
    sequential: bool = False

    @staticmethod
    def of(config: ModelConfig, weight: float, number: float, sequential: bool = False) -> TierWork:
        """The work of a model's passes, with so many bytes of a weight, and of a number of its KV."""
        weights, key = weight * config.weights_read, number * config.kv_size
        return TierWork(config.layers, weights, key, weight, config.heads // config.kv_heads, sequential)

    def weights_read(self, tokens: Any) -> Any:
        """Bytes of weights that a pass over so many tokens reads; those of experts would be of their union."""
        return self.weights + 0.0 * tokens

    def bytes(self, width: Any, rows: Any, keys: Any, balance: Any, overhead: Any, overlap: Any) -> Any:
        """Bytes whose reading would take as long as a pass, on such a machine (see `MACHINES`)."""
        once, repeats = (1.0, width) if self.sequential else (width, 1.0)
        tokens, balanced = once * rows, balance * self.number / 2
        weights = self.weights_read(tokens) * _longer(tokens / balanced, overlap)
        kv = self.key * keys * _longer(once * self.group / balanced, overlap)
        return LEAST + overhead * self.layers + repeats * (weights + kv)


def _longer(operations: Any, overlap: Any) -> Any:
    """The longer of 1, the time of the bytes, and that of operations; their sum where these do not overlap."""
    return (1.0 + operations**overlap) ** (1.0 / overlap)


ANY_WORK = TierWork()
USUAL_WORKS = {"ngram": TierWork(1, 0.0, 0.0), "draft": TierWork(2, 2e6, 0.0, sequential=True)}
Kind = tuple[str, int, int, int]
"""Tier, width, rows, and the size of its keys: a power of the square root of two."""


@dataclass(slots=True)
class Seen:
    """Passes of one kind: how many count, their keys in the mean, and the logarithm of their seconds at speed 1."""

    count: float
    keys: float
    log: float
    at: float = 0.0  # passes of all kinds until the latest of these


class PassCosts:
    """Costs of passes of each kind, and how fast the machine is now: `speed` is a factor of all seconds."""

    def __init__(self, works: dict[str, TierWork] | None = None, seen: dict[Kind, Seen] | None = None) -> None:
        self.works, self.seen, self.speed = USUAL_WORKS | (works or {}), seen or {}, 1.0
        self._passes, self._fit_at = 0.0, 16.0
        self._late: dict[str, deque[float]] = {}  # by tier: of the latest passes that were well known
        self._machines: dict[str, tuple[float, ...]] = {}  # by tier, of `MACHINES`
        self._arrays: dict[str, np.ndarray] = {}
        for tier in {name for name, *_ in self.seen}:
            self._fit(tier)

    def observe(self, tier: str, width: int, rows: int, keys: float, seconds: float, passes: int = 1) -> None:
        """Note passes that are alike: `width` tokens of each row, `keys` of all rows, `seconds` of one of them."""
        self._passes += passes
        if self._passes >= self._fit_at:
            self._fit_at = 2 * self._passes
            for each in {name for name, *_ in self.seen}:
                self._fit(each)
        kind = tier, width, rows, round(2 * np.log2(1 + keys / rows / KEY_SCALE))
        measured, found = float(np.log(max(seconds, 1e-7) / self.speed)), self.seen.get(kind)
        if found is None:
            if self._distances(tier, width, rows, keys).min(initial=1.0) < NEAR:
                self._note_late(
                    tier, measured - float(np.log(self.seconds(tier, width, rows, keys) / self.speed)), passes
                )
                measured = float(np.log(max(seconds, 1e-7) / self.speed))
            self._forget(tier)
            self.seen[kind] = Seen(passes, keys, measured, self._passes)
            self._fit(tier)
            return
        if found.count >= WELL_KNOWN:
            measured -= self._note_late(tier, measured - found.log, passes)
            if abs(measured - found.log) > np.log(CONFIG.outlier):
                found.count /= 2  # the machine did something else, or what was known is wrong
                return
        found.at = self._passes
        found.count = min(found.count + passes, CONFIG.pass_memory)
        part = min(1.0, passes / found.count)
        found.log += part * (measured - found.log)
        found.keys += part * (keys - found.keys)
        self._arrays.pop(tier, None)

    def seconds(self, tier: str, width: Any, rows: int, keys: Any) -> Any:
        """The seconds to expect of a pass, or of several: width and keys may be arrays of one shape."""
        width, keys = np.asarray(width, float), np.asarray(keys, float)
        expected = self.works.get(tier, ANY_WORK).bytes(width, rows, keys, *self._machine(tier))
        like = tier if self._known(tier) else "full"
        if not self._known(like):
            return 1e-10 * self.speed * expected
        count_N, _, _, _, off_N, at_N = self._array(like)
        count_N = count_N * np.exp2((at_N - self._passes) / AGE)
        far = self._distances(like, width, rows, keys)
        weight = count_N / (1 + count_N) * np.exp2(-16 * np.minimum(far, 50.0)) + 1e-245 * count_N
        off = (weight * off_N).sum(-1) / weight.sum(-1)
        unseen = np.minimum(1.0, far.min(-1))  # what is not known is thought well of, so that it is tried
        return self.speed * np.exp(off - CONFIG.unseen_gain * unseen) * expected

    def _distances(self, tier: str, width: Any, rows: int, keys: Any) -> np.ndarray:
        """Squared distances in octaves (..., N) of such passes to each kind that ran."""
        if not self._known(tier):
            return np.empty(0)
        _, width_N, rows_N, keys_N, *_ = self._array(tier)
        width, keys = np.asarray(width, float)[..., None], np.asarray(keys, float)[..., None]
        far: np.ndarray = (np.log2(width) - width_N) ** 2 + (np.log2(rows) - rows_N) ** 2
        far += (np.log2(1 + keys / KEY_SCALE) - keys_N) ** 2
        return far

    def count(self, tier: str, widest: int = WIDEST) -> float:
        """Passes of a tier that count, of at most so many tokens of a row."""
        return sum(each.count for (name, width, *_), each in self.seen.items() if name == tier and width <= widest)

    def _note_late(self, tier: str, late: float, passes: int) -> float:
        """Note the logarithm of measured over expected seconds. Returns a change of speed, which all tiers show."""
        self._late.setdefault(tier, deque(maxlen=5)).extend([late] * min(passes, 3))
        medians = {name: median(each) for name, each in self._late.items() if len(each) >= 3}
        shift = min(medians.values(), key=abs, default=0.0)
        alike = "full" in medians and len({each > 0 for each in medians.values()}) == 1
        if not alike or abs(shift) < np.log(CONFIG.changed_speed):
            return 0.0
        self.speed *= float(np.exp(shift))
        self._late.clear()
        return shift

    def _forget(self, tier: str) -> None:
        """Make room for another kind of passes of a tier."""
        kinds = [kind for kind in self.seen if kind[0] == tier]
        if len(kinds) >= MOST_KINDS:
            del self.seen[min(kinds, key=lambda kind: self.seen[kind].count)]

    def _known(self, tier: str) -> bool:
        return any(name == tier for name, *_ in self.seen)

    def _array(self, tier: str) -> np.ndarray:
        """(6, N): counts, logs of width, rows, keys, and of measured over expected seconds, and ages, of each kind."""
        if tier not in self._arrays:
            seen = [(each.count, each.log, each.at) for (name, *_), each in self.seen.items() if name == tier]
            (count_N, log_N, at_N), (width_N, rows_N, keys_N) = np.array(seen).T, self._kinds(tier)
            expected_N = self.works.get(tier, ANY_WORK).bytes(width_N, rows_N, keys_N, *self._machine(tier))
            found = count_N, np.log2(width_N), np.log2(rows_N), np.log2(1 + keys_N / KEY_SCALE)
            self._arrays[tier] = np.stack((*found, log_N - np.log(expected_N), at_N))
        return self._arrays[tier]

    def _kinds(self, tier: str) -> np.ndarray:
        """(3, N): width, rows and keys of each kind."""
        return np.array([(w, rows, each.keys) for (name, w, rows, _), each in self.seen.items() if name == tier]).T

    def _fit(self, tier: str) -> None:
        """Choose the machine of a tier's passes: the one under which all kinds of them are off alike."""
        work, (width_N, rows_N, keys_N) = self.works.get(tier, ANY_WORK), self._kinds(tier)
        seen = [(each.count, each.log) for (name, *_), each in self.seen.items() if name == tier]
        count_N, log_N = np.array(seen).T
        off_MN = log_N - np.log(work.bytes(width_N, rows_N, keys_N, *MACHINES.T[..., None]))
        weight_N = count_N / (count_N + 1)
        mean_M1 = off_MN @ weight_N[:, None] / weight_N.sum()
        other_M = np.any(np.not_equal(MACHINES, self._machine(tier)), 1)
        spread_M = (off_MN - mean_M1) ** 2 @ weight_N + 0.005 * other_M
        self._machines[tier] = tuple(MACHINES[spread_M.argmin()].tolist())
        self._arrays.pop(tier, None)

    def _machine(self, tier: str) -> tuple[float, ...]:
        """The machine of a tier; that of the full one where nothing is known of it."""
        return self._machines.get(tier) or self._machines.get("full") or USUAL_MACHINE

    def saved(self) -> Sequence[tuple[str, int, int, int, float, float, float]]:
        """All that was seen, at the speed of now."""
        shift = float(np.log(self.speed))
        return [(*kind, each.count, each.keys, each.log + shift) for kind, each in self.seen.items()]

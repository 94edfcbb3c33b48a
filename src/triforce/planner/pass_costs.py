"""Seconds of forward passes: a roofline of two bounds, times what the passes that are nearest showed.

Bytes and operations are known (`TierWork`), so widths that were never run are foretold. Kinds of passes that did run
say how far off that is; a shared factor, the machine's speed, says how fast it is now.

Shape suffixes: N kinds of passes, M machines, W tokens of a row, K numbers of keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log, log2
from statistics import median

import numpy as np

from triforce.planner.planner_config import CONFIG
from triforce.planner.tier_work import MACHINES, USUAL_MACHINE, USUAL_WORKS, TierWork

LEAST_SECONDS = 1e-7
NEAR = 0.3  # squared octaves to a kind that ran, within which another kind is foretold well
SHARPNESS, FAR = 16.0, 50.0  # how fast a kind's say fades with squared octaves, and where it fades no further
WELL_KNOWN, MANY, ENOUGH = 2.0, 4, 3  # passes of a kind; whose median is no accident; that tell of the speed
SURPRISE = 2.0  # times the expected seconds that a few passes of a new kind may take: some are interrupted
MOST_KINDS = 48  # of a tier
KEY_SCALE = 64.0
"""Keys below which their number hardly matters."""

FULL, AMONG_MODELS = "full", "full among models"
"""The full tier alone or with n-grams, and between passes of other models, which leave the processor's caches full of
other weights: behind short prompts that makes its passes half as long again."""

Kind = tuple[int, int, int]
"""Width, rows, and the size of its keys: a power of the square root of two."""


@dataclass(slots=True)
class Seen:
    """Passes of one kind: how many count, their keys in the mean, and the logarithm of their seconds at speed 1.

    own: whether this process has seen some. doubtful: whether the latest ones were left out.
    """

    count: float
    keys: float
    log: float
    own: bool = True
    doubtful: bool = False


@dataclass
class TierCosts:
    """Passes of one tier by kind, and the machine under which all kinds are off alike; seconds are those at speed 1."""

    work: TierWork
    seen: dict[Kind, Seen] = field(default_factory=dict)
    machine: tuple[float, ...] = USUAL_MACHINE
    _array_4N: np.ndarray | None = None  # of kinds: logarithms of width, rows, keys, and how far off they are

    def seconds(self, work: TierWork, width_W: np.ndarray, rows: int, keys: float) -> np.ndarray:
        """The seconds to expect of passes of such work over so many tokens of each row: (W,)."""
        expected_W = work.bytes(width_W, rows, keys, *self.machine)
        if not self.seen:
            return 1e-10 * np.asarray(expected_W)
        off_N, far_WN = self._array()[3], self._distances(width_W, rows, keys)
        count_N = np.array([each.count for each in self.seen.values()])
        weight_WN = count_N / (1 + count_N) * np.exp2(-SHARPNESS * np.minimum(far_WN, FAR))
        off_W = weight_WN @ off_N / weight_WN.sum(1)
        unseen_W = np.minimum(1.0, far_WN.min(1))  # what is not known is thought well of, so that it is tried
        found_W: np.ndarray = np.exp(off_W - CONFIG.unseen_gain * unseen_W) * expected_W
        return found_W

    @property
    def count(self) -> float:
        """Passes that count."""
        return sum(each.count for each in self.seen.values())

    def is_near(self, width: int, rows: int, keys: float) -> bool:
        """Whether a kind like this one ran."""
        return bool(self.seen) and float(self._distances(np.array([width]), rows, keys).min()) < NEAR

    def begin(self, kind: Kind, found: Seen) -> None:
        """Add a kind of passes; the least known one makes room for it."""
        if len(self.seen) >= MOST_KINDS:
            del self.seen[min(self.seen, key=lambda each: self.seen[each].count)]
        self.seen[kind] = found
        self.fit()

    def distrust(self, wrong: Seen) -> None:
        """Forget kinds that this process has not seen, as what was kept of one of them is wrong."""
        self.seen = {kind: each for kind, each in self.seen.items() if each.own or each is wrong}
        self.changed()

    def fit(self) -> None:
        """Choose the machine anew."""
        width_N, rows_N, keys_N, log_N, weight_N = self._kinds()
        off_MN = log_N - np.log(self.work.bytes(width_N, rows_N, keys_N, *MACHINES.T[..., None]))
        mean_M1 = off_MN @ weight_N[:, None] / weight_N.sum()
        other_M = np.any(np.not_equal(MACHINES, self.machine), 1)
        spread_M = (off_MN - mean_M1) ** 2 @ weight_N + 0.005 * other_M
        self.machine = tuple(MACHINES[spread_M.argmin()].tolist())
        self.changed()

    def changed(self) -> None:
        """Forget what was derived from the kinds."""
        self._array_4N = None

    def _kinds(self) -> np.ndarray:
        """(5, N): width, rows, keys, logarithm of seconds, and weight of each kind."""
        found = [(width, rows, x.keys, x.log, x.count / (1 + x.count)) for (width, rows, _), x in self.seen.items()]
        return np.array(found).T

    def _array(self) -> np.ndarray:
        if self._array_4N is None:
            width_N, rows_N, keys_N, log_N, _ = self._kinds()
            off_N = log_N - np.log(self.work.bytes(width_N, rows_N, keys_N, *self.machine))
            self._array_4N = np.stack((np.log2(width_N), np.log2(rows_N), np.log2(1 + keys_N / KEY_SCALE), off_N))
        return self._array_4N

    def _distances(self, width_W: np.ndarray, rows: int, keys: float) -> np.ndarray:
        """Squared distances in octaves (W, N) of such passes to each kind that ran."""
        width_N, rows_N, keys_N, _ = self._array()
        others_N = (log2(rows) - rows_N) ** 2 + (log2(1 + keys / KEY_SCALE) - keys_N) ** 2
        far_WN: np.ndarray = (np.log2(width_W)[:, None] - width_N) ** 2 + others_N
        return far_WN


class PassCosts:
    """Costs of passes of all tiers, and how fast the machine is now: `speed` is a factor of all seconds."""

    def __init__(self, works: dict[str, TierWork] | None = None) -> None:
        self.works, self.speed = USUAL_WORKS | (works or {}), 1.0
        self.tiers: dict[str, TierCosts] = {}
        self._passes, self._fit_at = 0, 16
        self._late: dict[str, deque[float]] = {}  # by tier: of the latest passes that were well known
        self._tables: dict[str, tuple[tuple[float, ...], np.ndarray]] = {}

    def observe(self, tier: str, width: int, rows: int, keys: float, seconds: float, passes: int = 1) -> float:
        """Note passes that are alike: `width` tokens of each row, `keys` of all rows, `seconds` of one of them.

        Returns the seconds that such a pass usually takes.
        """
        costs, kind = self.of(tier), (width, rows, round(2 * log2(1 + keys / rows / KEY_SCALE)))
        seconds, found = max(seconds, LEAST_SECONDS), costs.seen.get(kind)
        if found is None:
            expected = self.seconds(tier, width, rows, keys) if costs.seen else seconds
            if costs.is_near(*kind[:2], keys):
                self._note_late(tier, log(seconds / expected), passes)
            seconds = seconds if passes >= MANY else min(seconds, SURPRISE * expected)
            found = Seen(passes, keys, log(seconds / self.speed))
            costs.begin(kind, found)
        elif not self._is_outlier(found, tier, seconds, passes):
            found.own = True
            found.count = min(found.count + passes, CONFIG.pass_memory)
            part = min(1.0, passes / found.count)
            found.log += part * (log(seconds / self.speed) - found.log)
            found.keys += part * (keys - found.keys)
            costs.changed()
        for name in [name for name in self._tables if name == tier or not self.tiers[name].seen]:
            del self._tables[name]
        self._passes += passes
        if self._passes >= self._fit_at:
            self._fit_at = 2 * self._passes
            for known in self.tiers.values():
                if known.seen:
                    known.fit()
            self._tables.clear()
        return self.speed * exp(found.log)

    def of(self, tier: str) -> TierCosts:
        """The costs of one tier."""
        if tier not in self.tiers:
            self.tiers[tier] = TierCosts(self.works.get(tier) or self.works.get(FULL) or TierWork())
        return self.tiers[tier]

    def table(self, tier: str, rows: int, keys_K: Sequence[float], widest: int) -> np.ndarray:
        """The seconds to expect of passes of up to `widest` tokens of a row, of none first: (K, W)."""
        about = (rows, widest, *keys_K)
        if tier not in self._tables or self._tables[tier][0] != about:
            own, width_W = self.of(tier), np.arange(1.0, widest + 1)
            like = own if own.seen else self.of(FULL)
            found_KW = np.zeros((len(keys_K), widest + 1))
            for row_W, keys in zip(found_KW, keys_K, strict=True):
                row_W[1:] = self.speed * like.seconds(own.work, width_W, rows, keys)
            self._tables[tier] = about, found_KW
        return self._tables[tier][1]

    def seconds(self, tier: str, width: float, rows: int, keys: float) -> float:
        """The seconds to expect of one pass."""
        own = self.of(tier)
        like = own if own.seen else self.of(FULL)
        return self.speed * float(like.seconds(own.work, np.array([width], float), rows, keys)[0])

    def _is_outlier(self, found: Seen, tier: str, seconds: float, passes: int) -> bool:
        """Whether passes of a well-known kind took so long that the machine did something else.

        If that comes twice running, or of many passes, what was known is wrong, and is forgotten.
        """
        if found.count < WELL_KNOWN:
            return False
        late = log(seconds / self.speed) - found.log
        late -= self._note_late(tier, late, passes)
        outlier = abs(late) > log(CONFIG.outlier)
        same_speed = len(self._late.get(tier, ())) >= ENOUGH  # else all may be late alike
        if outlier and same_speed and (found.doubtful or passes >= MANY):
            found.count, outlier = 0.0, False
            self.of(tier).distrust(found)
        found.doubtful = outlier
        return outlier

    def _note_late(self, tier: str, late: float, passes: int) -> float:
        """Note the logarithm of measured over expected seconds. Returns a change of speed, which all tiers show."""
        self._late.setdefault(tier, deque(maxlen=5)).extend([late] * min(passes, ENOUGH))
        medians = {name: median(each) for name, each in self._late.items() if len(each) >= ENOUGH}
        shift = min(medians.values(), key=abs, default=0.0)
        alike = FULL in medians and len({each > 0 for each in medians.values()}) == 1
        if not alike or abs(shift) < log(CONFIG.changed_speed):
            return 0.0
        self.speed *= exp(shift)
        self._late.clear()
        self._tables.clear()
        return shift

"""Seconds of forward passes: a roofline of two bounds, times what the passes that are nearest showed.

Bytes and operations are known (`TierWork`), so widths that were never run are foretold. Kinds of passes that did run
say how far off that is; a shared factor, the machine's speed, says how fast it is now.

Shape suffixes: N kinds of passes, M machines, W tokens of a row, K numbers of keys. Where keys are (K, 1), what has W
has K before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, log, log2
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from triforce.model.config import ModelConfig
from triforce.model.expert_unions import ExpertUnions
from triforce.planner.planner_config import AMONG_MODELS, CONFIG, FULL

BALANCES = tuple(2 ** (step / 2) for step in range(2, 17))
"""Tokens of a pass from which bfloat16 weights are bound by operations: processors first, graphics cards last."""
OVERHEADS = (0.0, *(5e4 * 2**step for step in range(9)))
"""Bytes that could be read in the fixed time of a layer."""
OVERLAPS = 1.0, 8.0
"""Exponents: 1 where bytes are not read while operations run, 8 where they are, so that the longer of both counts."""
MACHINES = np.array(list(product(BALANCES, OVERHEADS, OVERLAPS)))
USUAL_BALANCE = 8.0
"""That of a machine on which passes of one width alone have run."""
BALANCE_OF_LEVEL = {"avx512bf16": 2**4.5}
"""The same, as measured, where the kernels' level has instructions for bfloat16."""
LEAST_BYTES = 1e4


def usual_machine(level: str = "") -> tuple[float, ...]:
    """The machine to begin with, of a level of the kernels: one of `MACHINES`."""
    return BALANCE_OF_LEVEL.get(level, USUAL_BALANCE), 4e5, 8.0


@dataclass(frozen=True, slots=True)
class TierWork:
    """Work of a tier's passes, by its model: layers, bytes of its weights and of a token's KV.

    weight, number: bytes of one weight, and of one number of KV. group: query heads of a KV head. sequential: a fused
    draft, which reads all for each of its tokens. experts: bytes of those that one token reads, which `weights` has
    too; unions: of those that several read.
    """

    layers: int = 8
    weights: float = 1e7
    key: float = 1e3
    weight: float = 2.0
    number: float = 2.0
    group: int = 1
    sequential: bool = False
    experts: float = 0.0
    unions: ExpertUnions | None = None

    @staticmethod
    def of(
        config: ModelConfig,
        weight: float,
        number: float,
        sequential: bool = False,
        lower: bool = False,
        unions: ExpertUnions | None = None,
    ) -> TierWork:
        """The work of a model's passes, with so many bytes of a weight, and of a number of its KV.

        lower: of a tier that reads less of the KV. unions: what is known of its experts, if it has any.
        """
        if config.kv_int8:
            number = config.kv_bytes(1) / config.kv_size
        number = config.lower_bytes if lower else number
        whole = config.windows.count(0) / config.layers  # the others read no more of a longer context
        weights = weight * config.weights_read
        key = number * config.kv_size * whole
        group = config.heads // config.kv_heads
        experts = config.architecture.experts
        chosen = 0.0
        if experts:
            chosen = weight * config.expert_weights * experts.active
            unions = unions or ExpertUnions(experts)
        return TierWork(config.layers, weights, key, weight, number, group, sequential, chosen, unions)

    @staticmethod
    def of_target(
        config: ModelConfig, weights: tuple[float, float], number: float, lower: bool, unions: ExpertUnions | None
    ) -> dict[str, TierWork]:
        """Return the work of a target's full and retrieval tier. weights: bytes of one in each; lower: the second's."""
        full, retrieval = (TierWork.of(config, weight, number, lower=below, unions=unions)
                           for weight, below in zip(weights, (False, lower), strict=True))  # fmt: skip
        return {"full": full, "retrieval": retrieval}

    @property
    def spread(self) -> float:
        """Spread of the unions of experts, which passes teach: what `bytes` says changes with it. 0: no experts."""
        return self.unions.spread if self.unions else 0.0

    def bytes(self, width: Any, rows: Any, keys: Any, balance: Any, overhead: Any, overlap: Any) -> Any:
        """Bytes whose reading would take as long as a pass, on such a machine (see `MACHINES`)."""
        once, repeats = (1.0, width) if self.sequential else (width, 1.0)
        tokens = once * rows
        most = balance * self.weight / 2
        weights = (self.weights - self.experts) * _longer(tokens / most, overlap)
        if self.unions:
            times = self.unions.times(once, rows)
            weights += self.experts * times * _longer(tokens / times / most, overlap)
        kv = self.key * keys * _longer(once * self.group / (balance * self.number / 2), overlap)
        return LEAST_BYTES + overhead * self.layers + repeats * (weights + kv)


def _longer(operations: Any, overlap: Any) -> Any:
    """The longer of 1, the time of the bytes, and that of operations; their sum where these do not overlap."""
    return (1.0 + operations**overlap) ** (1.0 / overlap)


USUAL_WORKS = {"ngram": TierWork(1, 0.0, 0.0), "draft": TierWork(2, 2e6, 0.0, sequential=True)}


LEAST_SECONDS = 1e-7
# how fast a kind's say fades with squared octaves, and where it fades no further
SHARPNESS = 16.0
FAR = 50.0
NEAR = 0.8  # how near a kind that ran is, from which on passes tell of the speed: half an octave
MANY = 4  # passes whose seconds are no accident
# passes that tell of the speed: of one observation at most, and of all tiers
ENOUGH = 2
LATEST = 9
MOST_KINDS = 48  # of a tier
KEY_SCALE = 64.0
"""Keys below which their number hardly matters."""
SAME_KEYS = 64
"""Steps of an octave within which numbers of keys count as the same in tables."""


Kind = tuple[int, int, int]
"""Width, rows, and the size of its keys: a power of the square root of two."""


@dataclass(slots=True)
class Seen:
    """Passes of one kind: how many count, their keys in the mean, and the logarithm of their seconds at speed 1.

    own: whether this process has seen some.
    """

    count: float
    keys: float
    log: float
    own: bool = True
    doubtful: bool = False  # whether the latest ones were off


class Known(NamedTuple):
    """Summary of a tier's passes, by kind: logarithms (base 2) of its width, rows and keys; how far off the machine
    is, as a logarithm, where unions of experts had this spread; and weights, which are 1 where many passes ran."""

    octaves_3N: np.ndarray
    off_N: np.ndarray
    weight_N: np.ndarray
    spread: float


class TierCosts:
    """Passes of one tier by kind, and the machine under which all kinds are off alike; seconds are those at speed 1.

    What is known is summed up when it is asked for: passes are added in between, many at a time.
    """

    def __init__(self, work: TierWork, usual: tuple[float, ...]) -> None:
        self.work = work
        self.seen = dict[Kind, Seen]()
        self.usual = self.machine = usual
        self._known: Known | None = None
        self._unfitted = False

    @property
    def count(self) -> float:
        """Passes that count."""
        return sum(each.count for each in self.seen.values())

    def changed(self, fit: bool) -> None:
        """Note that passes were added. fit: so little was known of their kind that the machine may be another one."""
        self._known = None
        self._unfitted = self._unfitted or fit

    def seconds(self, work: TierWork, width_W: np.ndarray, rows: int, keys: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds to expect of passes of such work over so many tokens of each row: (W,), or (K, W) of keys
        (K, 1).

        And how near the nearest kind is that ran: 1 if it is the same, half of that at a distance of an octave.
        """
        if not self.seen:
            return 1e-10 * np.asarray(work.bytes(width_W, rows, keys, *self.machine)), np.zeros(len(width_W))
        known = self._summed_up()
        width_N, rows_N, keys_N = known.octaves_3N
        others = (log2(rows) - rows_N) ** 2 + (np.log2(KEY_SCALE + np.asarray(keys))[..., None] - keys_N) ** 2
        far_WN = (np.log2(width_W)[:, None] - width_N) ** 2 + others  # squared octaves; (K, W, N) of keys (K, 1)
        weight_WN = known.weight_N * np.exp2(-SHARPNESS * np.minimum(far_WN, FAR))
        off_W = weight_WN @ known.off_N / weight_WN.sum(-1)
        nearest_W = far_WN.min(-1)
        off_W -= CONFIG.unseen_gain * np.minimum(1.0, nearest_W)  # what is not known is thought well of: it is tried
        return np.exp(off_W) * work.bytes(width_W, rows, keys, *self.machine), np.exp2(-nearest_W)

    def _summed_up(self) -> Known:
        spread = self.work.spread
        if self._known is None or self._known.spread != spread:
            found = [(width, rows, x.keys, x.log, x.count / (1 + x.count)) for (width, rows, _), x in self.seen.items()]
            width_N, rows_N, keys_N, log_N, weight_N = kinds_5N = np.array(found).T
            if self._unfitted:
                self._fit(kinds_5N)
            off_N = log_N - np.log(self.work.bytes(width_N, rows_N, keys_N, *self.machine))
            self._known = Known(np.log2((width_N, rows_N, KEY_SCALE + keys_N)), off_N, weight_N, spread)
        return self._known

    def _fit(self, kinds_5N: np.ndarray) -> None:
        """Choose the machine anew: the one from which all kinds differ by the same factor, as nearly as can be."""
        width_N, rows_N, keys_N, log_N, weight_N = kinds_5N
        off_MN = log_N - np.log(self.work.bytes(width_N, rows_N, keys_N, *MACHINES.T[..., None]))
        mean_M1 = off_MN @ weight_N[:, None] / weight_N.sum()
        other_M = np.any(np.not_equal(MACHINES, self.machine), 1)
        spread_M = (off_MN - mean_M1) ** 2 @ weight_N + 0.005 * other_M
        if np.ptp(width_N * rows_N) == 0:  # they say nothing of operations
            spread_M[MACHINES[:, 0] != self.usual[0]] = np.inf
        self.machine = tuple(MACHINES[spread_M.argmin()].tolist())
        self._unfitted = False


class PassCosts:
    """Costs of passes of all tiers, and how fast the machine is now: `speed` is a factor of all seconds."""

    def __init__(self, works: dict[str, TierWork] | None = None, level: str = "") -> None:
        self.works = USUAL_WORKS | (works or {})
        self.usual = usual_machine(level)
        self.speed = 1.0
        self.tiers: dict[str, TierCosts] = {}
        self._late: deque[tuple[str, float]] = deque(maxlen=LATEST)  # of the latest passes that were well known
        self._tables: dict[str, tuple[tuple[float, ...], np.ndarray]] = {}

    @property
    def confirmed(self) -> bool:
        """Whether this process has seen passes: those of a file may be another machine's, or a busy hour's."""
        return any(kind.own for costs in self.tiers.values() for kind in costs.seen.values())

    def of(self, tier: str) -> TierCosts:
        """The costs of one tier."""
        if tier not in self.tiers:
            self.tiers[tier] = TierCosts(self.works.get(tier) or self.works.get(FULL) or TierWork(), self.usual)
        return self.tiers[tier]

    def observe(self, tier: str, width: int, rows: int, keys: float, seconds: float, passes: int = 1) -> float:
        """Note passes that are alike: `width` tokens of each row, `keys` of all rows, `seconds` of one of them.

        A few that are off by `CONFIG.outlier` count as that, as something may have interrupted them. If the next ones
        of the kind are, too, what was known is forgotten. Returns the seconds that such a pass usually takes.
        """
        costs = self.of(tier)
        kind = (width, rows, round(2 * log2(1 + keys / rows / KEY_SCALE)))
        seconds = max(seconds, LEAST_SECONDS)
        most = log(CONFIG.outlier)
        found = costs.seen.get(kind)
        near = found is not None or costs.seconds(costs.work, np.array([float(width)]), rows, keys)[1][0] > NEAR
        if found is None:
            expected = self.seconds(tier, width, rows, keys) if costs.seen else seconds
            if len(costs.seen) >= MOST_KINDS:  # the least known one makes room
                del costs.seen[min(costs.seen, key=lambda each: costs.seen[each].count)]
            found = costs.seen[kind] = Seen(0.0, keys, log(expected / self.speed))
        late = log(seconds / self.speed) - found.log
        known = found.count
        if near:
            late -= self._change_speed(tier, late, passes)
        found.doubtful = abs(late) > most and passes < MANY and not found.doubtful
        if found.doubtful:
            late = min(max(late, -most), most)
        elif abs(late) > most:
            found.count = 0.0
            costs.seen = {each: x for each, x in costs.seen.items() if x.own or x is found}
        found.own = True
        found.count = min(found.count + passes, CONFIG.pass_memory)
        part = min(1.0, passes / found.count)
        found.log += part * late
        found.keys += part * (keys - found.keys)
        costs.changed(fit=known < MANY)
        told = {tier, AMONG_MODELS} if tier == FULL else {tier}  # by these costs
        self._tables = {name: x for name, x in self._tables.items() if name not in told and self.tiers[name].seen}
        return self.speed * exp(found.log)

    def table(self, tier: str, rows: int, keys_K: Sequence[float], widest: int) -> np.ndarray:
        """The seconds to expect of passes of up to `widest` tokens of a row, of none first: (K, W)."""
        sizes_K = [round(SAME_KEYS * log2(KEY_SCALE + keys)) for keys in keys_K]
        about = rows, widest, self.of(tier).work.spread, *sizes_K
        if tier not in self._tables or self._tables[tier][0] != about:
            found_KW = np.zeros((len(keys_K), widest + 1))
            found_KW[:, 1:] = self._seconds(tier, np.arange(1.0, widest + 1), rows, np.array(keys_K)[:, None])
            self._tables[tier] = about, found_KW
        return self._tables[tier][1]

    def seconds(self, tier: str, width: float, rows: int, keys: float) -> float:
        """The seconds to expect of one pass."""
        return float(self._seconds(tier, np.array([float(width)]), rows, keys)[0])

    def _seconds(self, tier: str, width_W: np.ndarray, rows: int, keys: Any) -> np.ndarray:
        """The same by width; of a tier that never ran, by the costs of the full one."""
        own = self.of(tier)
        full = self.of(FULL)
        found_W, near_W = (own if own.seen else full).seconds(own.work, width_W, rows, keys)
        if tier == AMONG_MODELS and own.seen and full.seen:
            # Behind short prompts they take longer, behind long ones they do not.
            alone_W, _ = full.seconds(own.work, width_W, rows, keys)
            found_W = alone_W * (found_W / alone_W) ** near_W
        return self.speed * found_W

    def _change_speed(self, tier: str, late: float, passes: int) -> float:
        """Change the speed if the latest passes of all tiers say so; returns the logarithm of the factor.

        late: the logarithm of measured over expected seconds. The tier that is late least says how much.
        """
        self._late.extend([(tier.split()[0], late)] * min(passes, ENOUGH))
        tiers = {name for name, _ in self._late}
        medians = [median(each for name, each in self._late if name == one) for one in tiers]
        shift = min(medians, key=abs)
        alike = FULL in tiers and len({each > 0 for each in medians}) == 1
        if not alike or abs(shift) < log(CONFIG.changed_speed) or len(self._late) < ENOUGH:
            return 0.0
        self.speed *= exp(shift)
        self._late.clear()
        self._tables.clear()
        return shift

"""Seconds of forward passes: a roofline of two bounds, times a correction by the nearest passes that ran.

Bytes and operations are known (`TierWork`), so the roofline also predicts widths that never ran. Kinds of passes that
ran give the deviation from it. A factor shared by all tiers, `speed`, follows the present speed of the machine.

Where the measurements come from: `speculation/tier.py` times each pass, `Counters` in `speculation/draft.py` record it,
and `Beliefs.learn_passes` in `planner/forecast.py` hands it to `PassCosts.observe`.

Shape suffixes: N kinds of passes, M machines, W tokens of a row, K numbers of keys. Where keys are (K, 1), arrays with
W have K before it.
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
"""Tokens of a pass from which bfloat16 weights are bound by operations: CPUs first, GPUs last."""
OVERHEADS = (0.0, *(5e4 * 2**step for step in range(9)))
"""Fixed time of a layer, as the bytes that could be read in it."""
OVERLAPS = 1.0, 8.0
"""Exponents: 1 where reads and operations take turns, 8 where they overlap, so that the longer of both counts."""
MACHINES = np.array(list(product(BALANCES, OVERHEADS, OVERLAPS)))
DEFAULT_BALANCE = 8.0
"""Balance of a machine on which only passes of one width have run."""
BALANCE_OF_LEVEL = {"avx512bf16": 2**4.5}
"""Measured balance, by level of the kernels, where that has instructions for bfloat16."""
LEAST_BYTES = 1e4


def default_machine(level: str = "") -> tuple[float, ...]:
    """The machine before any fit, by level of the kernels: one of `MACHINES`."""
    return BALANCE_OF_LEVEL.get(level, DEFAULT_BALANCE), 4e5, 8.0


@dataclass(frozen=True, slots=True)
class TierWork:
    """Work of a tier's passes, by its model.

    weights: bytes of all weights that a token reads. key: bytes of a token's KV. weight, number: bytes of one weight,
    and of one number of KV. group: query heads of a KV head. sequential: the passes of a fused draft, which reads
    everything for each of its tokens. experts: bytes of the experts that one token reads, which `weights` includes.
    unions: how many experts several tokens read.
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
        """The work of a model's passes. weight, number: bytes of one weight, and of one number of its KV.

        lower: the tier reads fewer bits of the KV. unions: of its experts, if it has any and something is known.
        """
        if config.kv_int8:
            number = config.kv_bytes(1) / config.kv_size
        number = config.lower_bytes if lower else number
        unwindowed_share = config.windows.count(0) / config.layers  # the others read no more of a longer context
        weights = weight * config.weights_read
        key = number * config.kv_size * unwindowed_share
        group = config.heads // config.kv_heads
        experts = config.architecture.experts
        expert_bytes = 0.0
        if experts:
            expert_bytes = weight * config.expert_weights * experts.active
            unions = unions or ExpertUnions(experts)
        return TierWork(config.layers, weights, key, weight, number, group, sequential, expert_bytes, unions)

    @staticmethod
    def of_target(
        config: ModelConfig, weights: tuple[float, float], number: float, lower: bool, unions: ExpertUnions | None
    ) -> dict[str, TierWork]:
        """Return the work of a target's full and retrieval tier, by name.

        weights: bytes of one weight in each tier. lower: the retrieval tier reads fewer bits of the KV.
        """
        full, retrieval = (TierWork.of(config, weight, number, lower=lower_bits, unions=unions)
                           for weight, lower_bits in zip(weights, (False, lower), strict=True))  # fmt: skip
        return {"full": full, "retrieval": retrieval}

    @property
    def spread(self) -> float:
        """Spread of the unions of experts, on which `bytes` depends. It is learnt from passes. 0: no experts."""
        return self.unions.spread if self.unions else 0.0

    def bytes(self, width: Any, rows: Any, keys: Any, balance: Any, overhead: Any, overlap: Any) -> Any:
        """Bytes that would take as long to read as the pass takes, on a machine of `MACHINES`."""
        columns, repeats = (1.0, width) if self.sequential else (width, 1.0)
        tokens = columns * rows
        balanced_tokens = balance * self.weight / 2
        weights = (self.weights - self.experts) * _longer(tokens / balanced_tokens, overlap)
        if self.unions:
            union_size = self.unions.times(columns, rows)
            weights += self.experts * union_size * _longer(tokens / union_size / balanced_tokens, overlap)
        kv = self.key * keys * _longer(columns * self.group / (balance * self.number / 2), overlap)
        return LEAST_BYTES + overhead * self.layers + repeats * (weights + kv)


def _longer(operations: Any, overlap: Any) -> Any:
    """Time of a part that takes 1 to read: the longer of 1 and `operations`, or their sum where they do not overlap."""
    return (1.0 + operations**overlap) ** (1.0 / overlap)


DEFAULT_WORKS = {"ngram": TierWork(1, 0.0, 0.0), "draft": TierWork(2, 2e6, 0.0, sequential=True)}


LEAST_SECONDS = 1e-7
# decay of a kind's weight with its squared distance in octaves, and the squared distance at which the decay ends
SHARPNESS = 16.0
MAX_DISTANCE = 50.0
MIN_NEARNESS = 0.8  # of a kind that ran, for a pass to vote on the speed: half an octave
RELIABLE_PASSES = 4  # passes whose seconds cannot all be outliers
# votes on the speed: of one observation at most and for a change at least, and of all tiers at most
MIN_VOTES = 2
MAX_VOTES = 9
MAX_KINDS = 48  # of passes that a tier keeps
KEY_SCALE = 64.0
"""Number of keys below which differences hardly matter."""
SAME_KEYS = 64
"""Steps of an octave: numbers of keys in the same step share a table."""


Kind = tuple[int, int, int]
"""Width, rows, and the rounded logarithm of the keys of a row, to the base of the square root of two."""


@dataclass(slots=True)
class PassStats:
    """Statistics of passes of one kind.

    count: passes that count. keys: their mean. log: logarithm of their seconds at speed 1. measured_here: this process
    has run some. last_was_outlier: the latest observation deviated by more than `CONFIG.outlier`.
    """

    count: float
    keys: float
    log: float
    measured_here: bool = True
    last_was_outlier: bool = False


class KindSummary(NamedTuple):
    """Summary of a tier's passes, by kind.

    octaves_3N: logarithms (base 2) of width, rows and keys. off_N: logarithm of measured over modelled seconds, at this
    `spread` of the unions of experts. weight_N: 1 where many passes ran, less where few did.
    """

    octaves_3N: np.ndarray
    off_N: np.ndarray
    weight_N: np.ndarray
    spread: float


class TierCosts:
    """Passes of one tier by kind, and the machine that fits them best. Seconds are those at speed 1.

    The summary is computed when it is needed, as many passes are added at a time.
    """

    def __init__(self, work: TierWork, machine: tuple[float, ...]) -> None:
        self.work = work
        self.stats = dict[Kind, PassStats]()
        self.default_machine = self.machine = machine
        self._summary: KindSummary | None = None
        self._needs_fit = False

    @property
    def count(self) -> float:
        """Number of passes that count, over all kinds."""
        return sum(stats.count for stats in self.stats.values())

    def invalidate(self, refit: bool) -> None:
        """Drop the summary after passes were added. refit: fit the machine again, as little was known of their kind."""
        self._summary = None
        self._needs_fit = self._needs_fit or refit

    def seconds(self, work: TierWork, width_W: np.ndarray, rows: int, keys: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the expected seconds of passes over `width_W` tokens of each row: (W,), or (K, W) for keys (K, 1).

        Also returns the nearness of the nearest kind that ran, in the same shape: 1 if it is the same kind, 1/2 at a
        distance of one octave.
        """
        if not self.stats:
            return 1e-10 * np.asarray(work.bytes(width_W, rows, keys, *self.machine)), np.zeros(len(width_W))
        summary = self._summarize()
        width_N, rows_N, keys_N = summary.octaves_3N
        batch_distance = (log2(rows) - rows_N) ** 2 + (np.log2(KEY_SCALE + np.asarray(keys))[..., None] - keys_N) ** 2
        distance_WN = (
            np.log2(width_W)[:, None] - width_N
        ) ** 2 + batch_distance  # squared octaves; (K, W, N) for keys (K, 1)
        weight_WN = summary.weight_N * np.exp2(-SHARPNESS * np.minimum(distance_WN, MAX_DISTANCE))
        off_W = weight_WN @ summary.off_N / weight_WN.sum(-1)
        nearest_W = distance_WN.min(-1)
        off_W -= CONFIG.unseen_gain * np.minimum(1.0, nearest_W)  # optimism for what never ran, so that it is tried
        return np.exp(off_W) * work.bytes(width_W, rows, keys, *self.machine), np.exp2(-nearest_W)

    def _summarize(self) -> KindSummary:
        spread = self.work.spread
        if self._summary is None or self._summary.spread != spread:
            kind_rows = [
                (width, rows, x.keys, x.log, x.count / (1 + x.count)) for (width, rows, _), x in self.stats.items()
            ]
            width_N, rows_N, keys_N, log_N, weight_N = kinds_5N = np.array(kind_rows).T
            if self._needs_fit:
                self._fit(kinds_5N)
            off_N = log_N - np.log(self.work.bytes(width_N, rows_N, keys_N, *self.machine))
            self._summary = KindSummary(np.log2((width_N, rows_N, KEY_SCALE + keys_N)), off_N, weight_N, spread)
        return self._summary

    def _fit(self, kinds_5N: np.ndarray) -> None:
        """Choose the machine from which all kinds deviate by the most uniform factor. A change costs a little."""
        width_N, rows_N, keys_N, log_N, weight_N = kinds_5N
        off_MN = log_N - np.log(self.work.bytes(width_N, rows_N, keys_N, *MACHINES.T[..., None]))
        mean_M1 = off_MN @ weight_N[:, None] / weight_N.sum()
        changed_M = np.any(np.not_equal(MACHINES, self.machine), 1)
        spread_M = (off_MN - mean_M1) ** 2 @ weight_N + 0.005 * changed_M
        if np.ptp(width_N * rows_N) == 0:  # the kinds give no evidence on operations
            spread_M[MACHINES[:, 0] != self.default_machine[0]] = np.inf
        self.machine = tuple(MACHINES[spread_M.argmin()].tolist())
        self._needs_fit = False


class PassCosts:
    """Costs of passes of all tiers. `speed`: factor of all seconds, as the machine is slower or faster now."""

    def __init__(self, works: dict[str, TierWork] | None = None, level: str = "") -> None:
        self.works = DEFAULT_WORKS | (works or {})
        self.default_machine = default_machine(level)
        self.speed = 1.0
        self.tiers: dict[str, TierCosts] = {}
        self._votes: deque[tuple[str, float]] = deque(maxlen=MAX_VOTES)  # tier and lateness of passes near a known kind
        self._tables: dict[str, tuple[tuple[float, ...], np.ndarray]] = {}

    @property
    def confirmed(self) -> bool:
        """Whether this process has measured passes. Those of a file may be of another machine, or of a busy hour."""
        return any(kind.measured_here for costs in self.tiers.values() for kind in costs.stats.values())

    def of(self, tier: str) -> TierCosts:
        """The costs of one tier."""
        if tier not in self.tiers:
            self.tiers[tier] = TierCosts(
                self.works.get(tier) or self.works.get(FULL) or TierWork(), self.default_machine
            )
        return self.tiers[tier]

    def observe(self, tier: str, width: int, rows: int, keys: float, seconds: float, passes: int = 1) -> float:
        """Record `passes` of one kind: `width` tokens of each row, `keys` of all rows, `seconds` of one pass.

        A few passes that deviate by more than `CONFIG.outlier` count as that much, as they may have been interrupted.
        If the next passes of the kind deviate as well, the earlier ones are forgotten, and so are the kinds of the tier
        that this process has not measured. Returns the seconds that such a pass is now expected to take.
        """
        costs = self.of(tier)
        kind = (width, rows, round(2 * log2(1 + keys / rows / KEY_SCALE)))
        seconds = max(seconds, LEAST_SECONDS)
        max_deviation = log(CONFIG.outlier)
        stats = costs.stats.get(kind)
        has_near_kind = (
            stats is not None or costs.seconds(costs.work, np.array([float(width)]), rows, keys)[1][0] > MIN_NEARNESS
        )
        if stats is None:
            expected = self.seconds(tier, width, rows, keys) if costs.stats else seconds
            if len(costs.stats) >= MAX_KINDS:  # the kind with the fewest passes makes room
                del costs.stats[min(costs.stats, key=lambda old_kind: costs.stats[old_kind].count)]
            stats = costs.stats[kind] = PassStats(0.0, keys, log(expected / self.speed))
        lateness = log(seconds / self.speed) - stats.log
        old_count = stats.count
        if has_near_kind:
            lateness -= self._change_speed(tier, lateness, passes)
        stats.last_was_outlier = (
            abs(lateness) > max_deviation and passes < RELIABLE_PASSES and not stats.last_was_outlier
        )
        if stats.last_was_outlier:
            lateness = min(max(lateness, -max_deviation), max_deviation)
        elif abs(lateness) > max_deviation:
            stats.count = 0.0
            costs.stats = {old_kind: x for old_kind, x in costs.stats.items() if x.measured_here or x is stats}
        stats.measured_here = True
        stats.count = min(stats.count + passes, CONFIG.pass_memory)
        part = min(1.0, passes / stats.count)
        stats.log += part * lateness
        stats.keys += part * (keys - stats.keys)
        costs.invalidate(refit=old_count < RELIABLE_PASSES)
        stale_tiers = {tier, AMONG_MODELS} if tier == FULL else {tier}  # tiers whose tables use these costs
        self._tables = {
            name: x for name, x in self._tables.items() if name not in stale_tiers and self.tiers[name].stats
        }
        return self.speed * exp(stats.log)

    def table(self, tier: str, rows: int, keys_K: Sequence[float], widest: int) -> np.ndarray:
        """The expected seconds (K, W) of passes of 0 to `widest` tokens of a row."""
        sizes_K = [round(SAME_KEYS * log2(KEY_SCALE + keys)) for keys in keys_K]
        table_key = rows, widest, self.of(tier).work.spread, *sizes_K
        if tier not in self._tables or self._tables[tier][0] != table_key:
            table_KW = np.zeros((len(keys_K), widest + 1))
            table_KW[:, 1:] = self._seconds(tier, np.arange(1.0, widest + 1), rows, np.array(keys_K)[:, None])
            self._tables[tier] = table_key, table_KW
        return self._tables[tier][1]

    def seconds(self, tier: str, width: float, rows: int, keys: float) -> float:
        """The expected seconds of one pass."""
        return float(self._seconds(tier, np.array([float(width)]), rows, keys)[0])

    def _seconds(self, tier: str, width_W: np.ndarray, rows: int, keys: Any) -> np.ndarray:
        """The expected seconds by width (W,), or (K, W). Of a tier that never ran: by the costs of the full tier."""
        tier_costs = self.of(tier)
        full = self.of(FULL)
        seconds_W, near_W = (tier_costs if tier_costs.stats else full).seconds(tier_costs.work, width_W, rows, keys)
        if tier == AMONG_MODELS and tier_costs.stats and full.stats:
            # Behind short prompts such passes take longer than those of the full tier alone; behind long ones not.
            alone_W, _ = full.seconds(tier_costs.work, width_W, rows, keys)
            seconds_W = alone_W * (seconds_W / alone_W) ** near_W
        return self.speed * seconds_W

    def _change_speed(self, tier: str, lateness: float, passes: int) -> float:
        """Change the speed if the latest passes of all tiers agree on it. Returns the logarithm of the factor.

        lateness: the logarithm of measured over expected seconds. The factor is that of the tier with the least one.
        """
        self._votes.extend([(tier.split()[0], lateness)] * min(passes, MIN_VOTES))
        tiers = {name for name, _ in self._votes}
        medians = [median(vote for name, vote in self._votes if name == tier_name) for tier_name in tiers]
        shift = min(medians, key=abs)
        all_agree = FULL in tiers and len({tier_median > 0 for tier_median in medians}) == 1
        if not all_agree or abs(shift) < log(CONFIG.changed_speed) or len(self._votes) < MIN_VOTES:
            return 0.0
        self.speed *= exp(shift)
        self._votes.clear()
        self._tables.clear()
        return shift

"""Seconds of forward passes: a roofline of two bounds, times a correction by the nearest passes that ran.

Bytes and operations are known (`TierWork`), so the roofline also predicts widths that never ran. Kinds of passes that
ran give the deviation from it. A factor shared by all tiers, `slowdown`, follows the present speed of the machine.

Where the measurements come from: `speculation/tier.py` times each pass, `Counters` in `speculation/draft.py` record it,
and `Beliefs.learn_passes` in `planner/forecast.py` hands it to `PassCosts.observe`.

Machine: the constants of the roofline (balance, overhead, overlap), one row of `MACHINES`.

Shape suffixes: N kinds of passes, M machines, W tokens of a row, K numbers of keys. For keys of shape (K, 1) the
results are (K, W) instead of (W,).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import exp, log, log2
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from triforce.model.config import ModelConfig
from triforce.model.expert_unions import ExpertUnions
from triforce.planner.planner_config import AMONG_MODELS, CONFIG, FULL, READING

BALANCES = tuple(2 ** (step / 2) for step in range(2, 17))
"""Numbers of tokens from which a pass over bfloat16 weights is compute-bound: CPUs first, GPUs last. The same number is
operations per byte read: each token takes two operations per weight, and a weight has two bytes."""
OVERHEADS = (0.0, *(5e4 * 2**step for step in range(9)))
"""Fixed time of a layer, as the bytes that could be read in it."""
OVERLAPS = 1.0, 8.0
"""Exponents p of `_longer`, (reads^p + operations^p)^(1/p): 1 gives their sum (no overlap), 8 nearly the longer one."""
MACHINES = np.array(list(product(BALANCES, OVERHEADS, OVERLAPS)))
"""All machines that a fit considers: balance, overhead and overlap in each row."""
DEFAULT_BALANCE = 8.0
"""Balance assumed until passes of different numbers of tokens have run, for levels that `BALANCE_OF_LEVEL` lacks; in
tokens as in `BALANCES`."""
BALANCE_OF_LEVEL = {"avx512bf16": 2**4.5}
"""Measured balance, by level of the kernels (see `cost_model.kernel_level`). Levels without instructions for bfloat16
have `DEFAULT_BALANCE`."""
PASS_OVERHEAD_BYTES = 1e4
"""Fixed time of a pass, as the bytes that could be read in it."""
ASSUMED_SECONDS_PER_BYTE = 1e-10
"""Seconds of reading one byte, assumed until a pass of the tier or of the full tier is measured."""


def default_machine(level: str = "") -> tuple[float, ...]:
    """The machine that is assumed before any fit, by level of the kernels."""
    return BALANCE_OF_LEVEL.get(level, DEFAULT_BALANCE), 4e5, 8.0


@dataclass(frozen=True, slots=True)
class TierWork:
    """Work of a tier's passes, by its model.

    weight_bytes: of all weights that a token reads. token_kv_bytes: of the K and V of a token. The method `TierWork.of`
    leaves out layers with a window. These read no more of a longer context, and the measured deviation includes their
    reads.
    bytes_per_weight, bytes_per_element: bytes of one weight, and of one element of KV. heads_per_kv_head: query heads
    of a KV head. sequential: a pass is a fused draft, which reads everything for each of its tokens. expert_bytes: of
    the experts that one token reads, which `weight_bytes` includes. unions: how many distinct experts several tokens
    read together; None: the model has no experts.
    """

    layers: int = 8
    weight_bytes: float = 1e7
    token_kv_bytes: float = 1e3
    bytes_per_weight: float = 2.0
    bytes_per_element: float = 2.0
    heads_per_kv_head: int = 1
    sequential: bool = False
    expert_bytes: float = 0.0
    unions: ExpertUnions | None = None

    @staticmethod
    def of(
        config: ModelConfig,
        bytes_per_weight: float,
        bytes_per_element: float,
        sequential: bool = False,
        reads_fewer_bits: bool = False,
        unions: ExpertUnions | None = None,
    ) -> TierWork:
        """Return the work of a model's passes.

        reads_fewer_bits: the tier reads fewer bits of each element of KV, by option `--lower-tiers`.
        unions: how many distinct experts several tokens read together, as learnt; None: as if tokens chose experts
        independently.
        """
        if config.kv_int8:
            bytes_per_element = config.kv_bytes(1) / config.kv_size
        bytes_per_element = config.lower_number_bytes if reads_fewer_bits else bytes_per_element
        # Layers with a window read no more of a longer context.
        unwindowed_share = config.windows.count(0) / config.layers
        token_kv_bytes = bytes_per_element * config.kv_size * unwindowed_share
        experts = config.architecture.experts
        expert_bytes = 0.0
        if experts:
            expert_bytes = bytes_per_weight * config.expert_weights * experts.active
            unions = unions or ExpertUnions(experts)
        return TierWork(
            config.layers, bytes_per_weight * config.weights_read, token_kv_bytes, bytes_per_weight, bytes_per_element,
            config.heads // config.kv_heads, sequential, expert_bytes, unions,
        )  # fmt: skip

    @staticmethod
    def of_target(
        config: ModelConfig,
        bytes_per_weight: tuple[float, float],
        bytes_per_element: float,
        reads_fewer_bits: bool,
        unions: ExpertUnions | None,
    ) -> dict[str, TierWork]:
        """Return the work of a target's full and retrieval tier, by name.

        bytes_per_weight: of each tier. reads_fewer_bits: the retrieval tier reads fewer bits of the KV.
        """
        full_weight_bytes, retrieval_weight_bytes = bytes_per_weight
        return {
            "full": TierWork.of(config, full_weight_bytes, bytes_per_element, unions=unions),
            "retrieval": TierWork.of(
                config, retrieval_weight_bytes, bytes_per_element, reads_fewer_bits=reads_fewer_bits, unions=unions
            ),
        }

    @property
    def spread(self) -> float:
        """The exponent `ExpertUnions.spread`, on which `byte_times` depends, as learnt from passes; 0: no experts."""
        return self.unions.spread if self.unions else 0.0

    def byte_times(self, width: Any, rows: Any, keys: Any, balance: Any, overhead: Any, overlap: Any) -> Any:
        """Return the time of a pass on a machine of `MACHINES`, in units of the time of reading one byte.

        keys: tokens of KV that the rows read, in all.
        """
        columns, repeats = (1.0, width) if self.sequential else (width, 1.0)
        tokens = columns * rows
        balanced_tokens = balance * self.bytes_per_weight / 2
        weights = (self.weight_bytes - self.expert_bytes) * _longer(tokens / balanced_tokens, overlap)
        if self.unions:
            union_size = self.unions.multiple(columns, rows)
            weights += self.expert_bytes * union_size * _longer(tokens / union_size / balanced_tokens, overlap)
        kv = (
            self.token_kv_bytes
            * keys
            * _longer(columns * self.heads_per_kv_head / (balance * self.bytes_per_element / 2), overlap)
        )
        return PASS_OVERHEAD_BYTES + overhead * self.layers + repeats * (weights + kv)


def _longer(operations: Any, overlap: Any) -> Any:
    """Return the time of the weights or KV of a pass, in units of the time of reading their bytes.

    operations: the time of the operations with these weights or KV, in the same unit. The result is the longer of the
    two times, or without overlap their sum.
    """
    return (1.0 + operations**overlap) ** (1.0 / overlap)


DEFAULT_WORKS = {"ngram": TierWork(1, 0.0, 0.0), "draft": TierWork(2, 2e6, 0.0, sequential=True)}


LEAST_SECONDS = 1e-7
# decay of a kind's weight with its squared distance in octaves, and the squared distance at which the decay ends
SHARPNESS = 16.0
MAX_DISTANCE = 50.0
# A pass votes on the slowdown only if a known kind is nearer than about half an octave. Nearness is 2 to the power of
# minus the squared distance in octaves.
MIN_NEARNESS = 0.8
RELIABLE_PASSES = 4  # passes whose seconds cannot all be outliers
MIN_VOTES = 2  # a new slowdown needs this number of votes, and one observation casts at most this number
MAX_VOTES = 9  # latest votes that are kept
MAX_KINDS = 48  # kinds of passes that a tier keeps
KEY_SCALE = 64.0
"""Number of keys below which differences hardly matter."""
KEY_STEPS_PER_OCTAVE = 64
"""Resolution of numbers of keys: those in the same step share a table."""


Kind = tuple[int, int, int]
"""Width, rows, and the rounded logarithm, to the base of the square root of two, of 1 + keys of a row / `KEY_SCALE`."""


@dataclass(slots=True)
class PassStats:
    """Statistics of passes of one kind.

    count: their number, at most `CONFIG.pass_memory`. keys: their mean. log_seconds: mean logarithm of their seconds at
    slowdown 1. measured_here: this process has run some. last_was_outlier: the latest observation was clipped to
    `CONFIG.outlier`.
    """

    count: float
    keys: float
    log_seconds: float
    measured_here: bool = True
    last_was_outlier: bool = False


class KindSummary(NamedTuple):
    """Summary of a tier's passes, by kind.

    octaves_3N: logarithms (base 2) of width, rows and keys. deviation_N: logarithm of measured seconds over
    `TierWork.byte_times`. weight_N: 1 where many passes ran, less where few did. spread: `TierWork.spread` at the time
    of the summary, on which `deviation_N` depends.
    """

    octaves_3N: np.ndarray
    deviation_N: np.ndarray
    weight_N: np.ndarray
    spread: float


class TierCosts:
    """Passes of one tier by kind, and the machine that fits them best. Seconds are those at slowdown 1.

    The summary is computed when it is needed, because many passes are added at a time.
    """

    def __init__(self, work: TierWork, machine: tuple[float, ...]) -> None:
        self.work = work
        self.stats = dict[Kind, PassStats]()
        self.default_machine = self.machine = machine
        self._summary: KindSummary | None = None
        self._needs_fit = False

    @property
    def count(self) -> float:
        """Number of passes of all kinds, each kind limited to `CONFIG.pass_memory` passes."""
        return sum(stats.count for stats in self.stats.values())

    def invalidate(self, refit: bool) -> None:
        """Drop the summary after passes were added.

        refit: fit the machine again, because little was known of their kind.
        """
        self._summary = None
        self._needs_fit = self._needs_fit or refit

    def seconds(self, work: TierWork, width_W: np.ndarray, rows: int, keys: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the expected seconds of passes over `width_W` tokens of each row: (W,), or (K, W) for keys (K, 1).

        Also returns the nearness of the nearest kind that ran: 1 at the same width, rows and keys, and 1/2 at a
        distance of one octave; zeros of shape (W,) if none ran.
        """
        if not self.stats:
            byte_times_W = np.asarray(work.byte_times(width_W, rows, keys, *self.machine))
            return ASSUMED_SECONDS_PER_BYTE * byte_times_W, np.zeros(len(width_W))
        summary = self._summarize()
        width_N, rows_N, keys_N = summary.octaves_3N
        batch_distance = (log2(rows) - rows_N) ** 2 + (np.log2(KEY_SCALE + np.asarray(keys))[..., None] - keys_N) ** 2
        distance_WN = (
            np.log2(width_W)[:, None] - width_N
        ) ** 2 + batch_distance  # squared octaves; (K, W, N) for keys (K, 1)
        weight_WN = summary.weight_N * np.exp2(-SHARPNESS * np.minimum(distance_WN, MAX_DISTANCE))
        deviation_W = weight_WN @ summary.deviation_N / weight_WN.sum(-1)
        nearest_W = distance_WN.min(-1)
        deviation_W -= CONFIG.unseen_gain * np.minimum(1.0, nearest_W)  # optimism: widths that never ran are tried
        return np.exp(deviation_W) * work.byte_times(width_W, rows, keys, *self.machine), np.exp2(-nearest_W)

    def _summarize(self) -> KindSummary:
        spread = self.work.spread
        if self._summary is None or self._summary.spread != spread:
            kind_rows = [
                (width, rows, x.keys, x.log_seconds, x.count / (1 + x.count))
                for (width, rows, _), x in self.stats.items()
            ]
            width_N, rows_N, keys_N, log_N, weight_N = kinds_5N = np.array(kind_rows).T
            if self._needs_fit:
                self._fit(kinds_5N)
            deviation_N = log_N - np.log(self.work.byte_times(width_N, rows_N, keys_N, *self.machine))
            self._summary = KindSummary(np.log2((width_N, rows_N, KEY_SCALE + keys_N)), deviation_N, weight_N, spread)
        return self._summary

    def _fit(self, kinds_5N: np.ndarray) -> None:
        """Choose the machine whose errors vary least between kinds of passes. A new one must be better by a little."""
        width_N, rows_N, keys_N, log_N, weight_N = kinds_5N
        deviation_MN = log_N - np.log(self.work.byte_times(width_N, rows_N, keys_N, *MACHINES.T[..., None]))
        mean_M1 = deviation_MN @ weight_N[:, None] / weight_N.sum()
        changed_M = np.any(np.not_equal(MACHINES, self.machine), 1)
        error_M = (deviation_MN - mean_M1) ** 2 @ weight_N + 0.005 * changed_M
        if np.ptp(width_N * rows_N) == 0:  # the kinds give no evidence on operations
            error_M[MACHINES[:, 0] != self.default_machine[0]] = np.inf
        self.machine = tuple(MACHINES[error_M.argmin()].tolist())
        self._needs_fit = False


class PassCosts:
    """Costs of passes of all tiers. slowdown: present factor of all seconds; below 1 if the machine is faster now."""

    def __init__(self, works: dict[str, TierWork] | None = None, level: str = "") -> None:
        self.works = DEFAULT_WORKS | (works or {})
        self.works[READING] = replace(self.works["draft"], sequential=False)
        self.default_machine = default_machine(level)
        self.slowdown = 1.0
        self.tiers: dict[str, TierCosts] = {}
        self._votes: deque[tuple[str, float]] = deque(maxlen=MAX_VOTES)  # tier and lateness of passes near a known kind
        self._tables: dict[str, tuple[tuple[float, ...], np.ndarray]] = {}

    @property
    def confirmed(self) -> bool:
        """Whether this process has measured passes.

        Those of a file may be of a busy hour, or of another machine with the same host name.
        """
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

        The deviation of fewer than `RELIABLE_PASSES` passes is clipped to `CONFIG.outlier`, as the passes may have been
        interrupted. If the next passes of the kind deviate as well, the earlier ones are forgotten, and so are the
        kinds of the tier that this process has not measured. Returns the seconds that such a pass is now expected to
        take.
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
            stats = costs.stats[kind] = PassStats(0.0, keys, log(expected / self.slowdown))
        lateness = log(seconds / self.slowdown) - stats.log_seconds
        old_count = stats.count
        if has_near_kind:
            lateness -= self._change_slowdown(tier, lateness, passes)
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
        stats.log_seconds += part * lateness
        stats.keys += part * (keys - stats.keys)
        costs.invalidate(refit=old_count < RELIABLE_PASSES)
        stale_tiers = {tier, AMONG_MODELS} if tier == FULL else {tier}  # tiers whose tables use these costs
        self._tables = {
            name: x for name, x in self._tables.items() if name not in stale_tiers and self.tiers[name].stats
        }
        return self.slowdown * exp(stats.log_seconds)

    def table(self, tier: str, rows: int, keys_K: Sequence[float], widest: int) -> np.ndarray:
        """Return the expected seconds (K, W) of passes of 0 to `widest` tokens of a row."""
        sizes_K = [round(KEY_STEPS_PER_OCTAVE * log2(KEY_SCALE + keys)) for keys in keys_K]
        table_key = rows, widest, self.of(tier).work.spread, *sizes_K
        if tier not in self._tables or self._tables[tier][0] != table_key:
            table_KW = np.zeros((len(keys_K), widest + 1))
            table_KW[:, 1:] = self._seconds(tier, np.arange(1.0, widest + 1), rows, np.array(keys_K)[:, None])
            self._tables[tier] = table_key, table_KW
        return self._tables[tier][1]

    def seconds(self, tier: str, width: float, rows: int, keys: float) -> float:
        """Return the expected seconds of one pass."""
        return float(self._seconds(tier, np.array([float(width)]), rows, keys)[0])

    def _seconds(self, tier: str, width_W: np.ndarray, rows: int, keys: Any) -> np.ndarray:
        """Return the expected seconds by width (W,), or (K, W). A tier that never ran deviates like the full tier."""
        tier_costs = self.of(tier)
        full = self.of(FULL)
        seconds_W, near_W = (tier_costs if tier_costs.stats else full).seconds(tier_costs.work, width_W, rows, keys)
        if tier == AMONG_MODELS and tier_costs.stats and full.stats:
            # After short prompts such passes take longer than those of the full tier alone; after long ones they do
            # not. So a measured ratio of the two counts fully for its own kind of pass, and less the farther a kind is.
            alone_W, _ = full.seconds(tier_costs.work, width_W, rows, keys)
            seconds_W = alone_W * (seconds_W / alone_W) ** near_W
        return self.slowdown * seconds_W

    def _change_slowdown(self, tier: str, lateness: float, passes: int) -> float:
        """Change the slowdown if the latest passes of all tiers agree on it. Returns the logarithm of the factor.

        lateness: the logarithm of measured over expected seconds. The factor is that of the tier that deviates least.
        """
        self._votes.extend([(tier.split()[0], lateness)] * min(passes, MIN_VOTES))
        tiers = {name for name, _ in self._votes}
        medians = [median(vote for name, vote in self._votes if name == tier_name) for tier_name in tiers]
        shift = min(medians, key=abs)
        all_agree = FULL in tiers and len({tier_median > 0 for tier_median in medians}) == 1
        if not all_agree or abs(shift) < log(CONFIG.slowdown_step) or len(self._votes) < MIN_VOTES:
            return 0.0
        self.slowdown *= exp(shift)
        self._votes.clear()
        self._tables.clear()
        return shift

"""Work of a tier's passes, in bytes and operations, and the machines that it may be done on: a roofline of two bounds.

A component of a pass takes the longer of two times, that of its bytes and that of its operations (Williams et al.
2009): seconds = constant + sum of max(bytes / bandwidth, operations / rate), of the weights and of the KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from triforce.model.config import ModelConfig
from triforce.model.expert_unions import ExpertUnions

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
        weights, key = weight * config.weights_read, number * config.kv_size * whole
        group, experts, chosen = config.heads // config.kv_heads, config.architecture.experts, 0.0
        if experts:
            chosen, unions = weight * config.expert_weights * experts.read, unions or ExpertUnions(experts)
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
        tokens, most = once * rows, balance * self.weight / 2
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

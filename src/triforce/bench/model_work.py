"""Work of a model's passes: the bytes that they must read, and their operations."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from triforce.bench.roofline import Work
from triforce.model.config import ModelConfig
from triforce.model.weights import Matrix, Weights, nbytes


class ModelWork:
    """Numbers that the products of a model read, and their bytes; KV is as its config has it."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        experts = {id(part) for layer in weights.layers for expert in layer.experts for part in expert.weights()}
        self._read = {kind: Size() for kind in ("dense", "experts")}
        for weight in weights.multiplied():
            self._read["experts" if id(weight) in experts else "dense"].add(weight)
        self._coded = not weights.has_numbers

    def of(self, width: float, keys: int, config: ModelConfig | None = None, union: float = 1.0) -> Work:
        """Work of a pass of so many tokens, each over so many keys, as this config or the model's own has them.

        union: experts that the pass reads, in so many times those of one token.
        """
        products, attention = self._operations(width, keys)
        config = config or self.config
        operations = Counter({type_of_products(self._coded, "bfloat16"): products})
        operations += Counter(coded_attention(attention) if config.kv_int8 else {"bfloat16": attention})
        return Work(round(self._bytes(union) + config.kv_bytes(2) * self._seen(keys)), operations)

    def of_lower(self, width: float, keys: int, bits: int) -> Work:
        """Work of a pass of a lower tier that reads numbers of so many bits, and codes as they are."""
        weights = self._bytes() if self._coded else self._numbers * bits / 8
        read = round(weights + self.config.lower_bytes * self.config.kv_size * self._seen(keys))
        return Work(read, {type_of_products(self._coded, "int8"): sum(self._operations(width, keys))})

    @property
    def _numbers(self) -> float:
        """Numbers that the products of one token read."""
        return self._read["dense"].numbers + self._chosen * self._read["experts"].numbers

    def _bytes(self, union: float = 1.0) -> float:
        """Bytes that the products of so many times the experts of one token read."""
        return self._read["dense"].bytes + union * self._chosen * self._read["experts"].bytes

    @property
    def _chosen(self) -> float:
        """The part of all experts that one token reads."""
        experts = self.config.architecture.experts
        return experts.read / experts.held if experts else 0.0

    def _seen(self, keys: int) -> float:
        """Return how many of so many keys a token sees, in the mean of the layers."""
        return sum(min(window or keys, keys) for window in self.config.windows) / self.config.layers

    def _operations(self, width: float, keys: int) -> tuple[int, int]:
        """Operations of products with weights, and of attention."""
        queries = self.config.layers * self.config.heads * self.config.head_dim
        return round(2 * width * self._numbers), round(4 * width * self._seen(keys) * queries)


def type_of_products(coded: bool, dtype: str) -> str:
    """Return the type of numbers that are multiplied with weights: with those of few bits, as they are, int16."""
    return "int16" if coded else dtype


def coded_attention(operations: int) -> dict[str, int]:
    """Return so many operations of attention over int8 KV by type: scores are of bytes, weights have 16 bits."""
    return {"int8": operations // 2, "int16": operations // 2}


@dataclass
class Size:
    """Numbers of matrices, and their bytes."""

    numbers: int = 0
    bytes: int = 0

    def add(self, weight: Matrix) -> None:
        """Count one more."""
        self.numbers += math.prod(weight.shape)
        self.bytes += nbytes(weight)

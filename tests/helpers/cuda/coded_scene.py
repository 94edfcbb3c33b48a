"""Scenes over int8 KV for the Triton kernels. Slots that no list reaches have a scale that is no number."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.helpers.cuda.scene import Case, Scene
from triforce.backends.cuda.kv_pages import write_rows
from triforce.backends.torch.int8_rows import numbers, rounded, rounded_queries

BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-8 + 2**-9, torch.float16: 2**-9 + 2**-11}
"""Error bounds of mixed values by the model's type. On a GPU, attention weights are bfloat16 for float16, too."""
MASS = 2e-5


class CodedScene(Scene):
    """A scene with int8 codes in memory. The reference reads the numbers that they stand for."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        padding = 0, 0, 0, -self.k.shape[1] % 16  # to whole pages
        rows = [rounded(torch.nn.functional.pad(memory, padding)) for memory in (self.k, self.v)]
        self.plain = self.k, self.v = tuple(numbers(row_values) for row_values in rows)
        self.coded = tuple(torch.zeros_like(row_values) for row_values in rows)
        for memory, row_values in zip(self.coded, rows, strict=True):
            row_values[:, self.unseen()] = -1  # NaN as a scale
            write_rows(memory, torch.arange(row_values.shape[1]), row_values)
        self.queries = self.q, self.q_sinks

    def unseen(self) -> Tensor:
        """Return the slots that no page list reaches."""
        case = self.case
        unseen_S = torch.ones(self.k.shape[1], dtype=torch.bool)
        for list_U, start, count in zip(self.units, case.starts, case.counts, strict=True):
            slots = (list_U[..., None].long() * case.unit + torch.arange(case.unit)).flatten(-2)
            unseen_S[slots[..., : start + count]] = False
        return unseen_S

    def by_kernel(self, shift: int = 0, split: int | None = 64) -> tuple[Tensor, Tensor]:
        self.k, self.v = self.coded
        try:
            return super().by_kernel(shift, split)
        finally:
            self.k, self.v = self.plain

    def by_the_book(self) -> tuple[Tensor, Tensor]:
        self.q, self.q_sinks = map(rounded_queries, self.queries)
        try:
            return super().by_the_book()
        finally:
            self.q, self.q_sinks = self.queries


def agree(case: Case) -> None:
    scene = CodedScene(case)
    (mixed, mass), (expected, wanted_mass) = scene.by_kernel(), scene.by_the_book()
    assert mixed.dtype == case.dtype
    assert scene.error(mixed, expected) <= BOUND[case.dtype]
    torch.testing.assert_close(mass.double(), wanted_mass, atol=MASS, rtol=MASS)

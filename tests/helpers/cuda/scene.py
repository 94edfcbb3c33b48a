"""Lists over random memory for the Triton kernels, and attention by the book over them, in float64.

Shape suffixes as in backends/kernel_api.py; S keys of a row, N slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.paged_kv import by_the_book, visible
from triforce.backends.cuda.triton.attention import DevicePageTable, attend
from triforce.backends.kernel_api import PageTable
from triforce.backends.torch.int8_rows import rotated_head
from triforce.model.kv_rows import hadamard_block

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Device of the compared kernels. On a CPU they are interpreted."""

SPLIT = 64  # the smallest, so that few keys make several splits
Array = np.ndarray[Any, Any]


def by_the_term(a: Array, b: Array, dtype: type) -> Array:
    """Multiply matrices; sum each number in one order, as a GPU does."""
    return sum(a[..., j, None].astype(dtype) * b[..., j, None, :].astype(dtype) for j in range(a.shape[-1]))


@dataclass
class Case:
    D: int = 16
    G: int = 2
    group: int = 2
    T: int = 3
    starts: list[int] = field(default_factory=lambda: [20, 150])
    counts: list[int] = field(default_factory=lambda: [3, 2])
    unit: int = 16
    by_head: bool = True
    sinks: int = 16
    window: int = 40
    turned: bool = True
    """Whether sinks have queries of their own rotation."""
    rotated: bool = False
    """Whether heads are rotated for int8, so that mixed values are rotated back."""
    weigh: bool = True
    spare: int = 1
    """Units at the end of the longest list that no query sees."""
    dtype: torch.dtype = torch.float32
    seed: int = 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    T = draw(st.integers(1, 12) | st.sampled_from([16, 33, 64]))
    edges = st.sampled_from([0, 1, 15, 16, 63, 64, 65, 127, 128, 130])
    rows = draw(st.lists(st.tuples(edges, st.integers(0, T)), min_size=1, max_size=3))
    window = draw(st.just(0) | st.integers(1, 130))
    unit = draw(st.sampled_from([16, 16, 8, 1]))
    return Case(
        D=draw(st.sampled_from([16, 24, 64])), G=draw(st.integers(1, 2)), group=draw(st.sampled_from([1, 2, 3, 8])),
        T=T, starts=[start for start, _ in rows], counts=[count for _, count in rows], unit=unit,
        by_head=draw(st.booleans()), sinks=unit * draw(st.integers(0, 3)) if window else 0, window=window,
        turned=bool(window) and draw(st.booleans()), rotated=draw(st.booleans()), weigh=draw(st.booleans()),
        spare=draw(st.integers(0, 2)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])), seed=draw(st.integers(0, 999)),
    )  # fmt: skip


class Scene:
    """The tensors of a case. Queries that are padding are NaN."""

    def __init__(self, case: Case) -> None:
        self.case = case
        draw = torch.Generator().manual_seed(case.seed)
        B = len(case.starts)
        H = case.G * case.group
        self.q, self.q_sinks = (torch.randn(B, case.T, H, case.D, generator=draw).to(case.dtype) for _ in range(2))
        for b, count in enumerate(case.counts):
            self.q[b, count:] = self.q_sinks[b, count:] = torch.nan
        used = max(-(-(start + count) // case.unit) for start, count in zip(case.starts, case.counts, strict=True))
        units = 200 // case.unit
        shape = (B, case.G, used + case.spare) if case.by_head else (B, used + case.spare)
        self.units = torch.randint(units, shape, generator=draw).int()
        N = units * case.unit
        self.k, self.v = (torch.randn(case.G, N, case.D, generator=draw).to(case.dtype) for _ in range(2))

    @property
    def lists(self) -> PageTable:
        case = self.case
        return PageTable(self.units, case.starts, case.counts, case.unit, case.sinks, case.window)

    def by_kernel(self, shift: int = 0, split: int | None = SPLIT) -> tuple[Tensor, Tensor]:
        """Return mixed values and mass of the kernel. `shift` shifts the queries' positions."""
        case = self.case
        integers = self.units, torch.tensor(case.starts) + shift, torch.tensor(case.counts)
        page_table = DevicePageTable(*(x.to(DEVICE) for x in integers), case.unit, case.sinks, case.window)
        q, k, v, q_sinks = (x.to(DEVICE) for x in (self.q, self.k, self.v, self.q_sinks))
        together = hadamard_block(case.D) if case.rotated else 1
        mixed, mass = attend(q, k, v, page_table, case.weigh, q_sinks if case.turned else None, split, together)
        return mixed.cpu(), mass.cpu()

    def by_the_book(self) -> tuple[Tensor, Tensor]:
        case = self.case
        mixed = torch.zeros(self.q.shape, dtype=torch.float64)
        mass = torch.zeros(len(self.q), case.G, self.units.shape[-1], dtype=torch.float64)
        for b, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
            for g in range(case.G if count else 0):
                self._head(b, g, visible(start, count, start + count, case.sinks, case.window), mixed, mass)
        return rotated_head(mixed).double() if case.rotated else mixed, mass

    def _head(self, b: int, g: int, seen_TS: Tensor, mixed: Tensor, mass: Tensor) -> None:
        case, (count, S) = self.case, seen_TS.shape
        list_U = (self.units[b, g] if case.by_head else self.units[b]).long()
        slots_S = (list_U[:, None] * case.unit + torch.arange(case.unit)).flatten()[:S]
        heads = slice(g * case.group, (g + 1) * case.group)
        q, q_sinks = (x[b, :count, heads] for x in (self.q, self.q_sinks))
        k, v = (x[g, slots_S][:, None] for x in (self.k, self.v))
        mixed[b, :count, heads], _ = by_the_book(q, k, v, seen_TS, q_sinks if case.turned else None, case.sinks)
        # Each key as a page of its own: values that name their key come back as its weight.
        eye = torch.eye(S, dtype=torch.float64)[:, None]
        wide = [torch.nn.functional.pad(x, (0, max(0, S - x.shape[-1]))) for x in (q, q_sinks, k)]
        scale = (wide[0].shape[-1] / case.D) ** 0.5
        turned = wide[1].double() * scale if case.turned else None
        weights_THS, _ = by_the_book(wide[0].double() * scale, wide[2], eye, seen_TS, turned, case.sinks)
        sums_S = torch.nn.functional.pad(weights_THS.sum((0, 1))[:S], (0, -S % case.unit))
        per_unit = sums_S.view(-1, case.unit).sum(1)
        mass[b, g, : len(per_unit)] = per_unit

    def error(self, mixed: Tensor, expected: Tensor) -> float:
        """Return the largest error of mixed values, relative to the largest value in memory."""
        return float((mixed.double() - expected).abs().nan_to_num(torch.inf).max() / self.v.double().abs().max())

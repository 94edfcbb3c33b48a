"""The native attention against the torch path for any lists, widths and windows, which hypothesis draws.

Shape suffixes as in paged.py; U pages of a list, N slots of the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.paged_kv import PAGE, native, visible
from triforce.backends.kernel_api import PageTable
from triforce.backends.torch.kv import TorchKV, attend_tables
from triforce.model.rope import Rope

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
torch.set_num_threads(1)

DTYPES = [torch.bfloat16, torch.float32]
ROUNDING = 2**-24
"""The largest relative error of one operation in float32."""
BFLOAT16 = 2**-8 + 2**-9
"""Relative errors as in test_attention.py: of rounded weights, and of the result."""
BORDERS = [0, 1, 15, 16, 17, 47, 48, 63, 64, 65, 1007, 1008, 1023, 1024, 1025, 2047, 2048]


@dataclass
class Case:
    D: int
    G: int
    group: int
    T: int
    starts: list[int]
    counts: list[int]
    spare: int
    """Pages at the end of the longest list that no query sees."""
    by_head: bool
    pages: int
    """Of the memory: with few of them, lists have pages in common, and one page more than once."""
    sinks: int
    window: int
    turned: bool
    """Whether queries are rotated apart for the sinks."""
    weigh: bool
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    T = draw(st.integers(1, 40))
    rows = draw(st.lists(st.tuples(st.sampled_from(BORDERS) | st.integers(0, 300), st.integers(0, T)), max_size=4))
    return Case(
        D=draw(st.sampled_from([64, 80, 96, 128, 256])),
        G=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16])),
        T=T,
        starts=[start for start, _ in rows],
        counts=[count for _, count in rows],
        spare=draw(st.integers(0, 2)),
        by_head=draw(st.booleans()),
        pages=draw(st.integers(1, 40)),
        sinks=PAGE * draw(st.integers(0, 5)),
        window=draw(st.just(0) | st.integers(1, 130) | st.sampled_from([1024, 2**31 - 1])),
        turned=draw(st.booleans()),
        weigh=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


class Scene:
    """The tensors of a case. Slots that no query sees are NaN for the native kernels, and 0 for torch."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        draw = torch.Generator().manual_seed(case.seed)
        B, T, H, D = len(case.starts), case.T, case.G * case.group, case.D
        self.q, self.q_sinks = (torch.randn(B, T, H, D, generator=draw).to(dtype) for _ in range(2))
        for b, count in enumerate(case.counts):
            self.q[b, count:] = self.q_sinks[b, count:] = torch.nan
        used = [
            -(-(start + count) // PAGE) if count else 0 for start, count in zip(case.starts, case.counts, strict=True)
        ]
        U = max(used, default=0) + case.spare
        self.units = torch.randint(1, case.pages + 1, (B, case.G if case.by_head else 1, U), generator=draw).int()
        for b, count in enumerate(used):
            self.units[b, :, count:] = -1
        N = (case.pages + 1) * PAGE
        hidden_NG = ~self._visible_slots(N)
        self.k, self.v = (torch.randn(N, case.G, D, generator=draw).to(dtype) for _ in range(2))
        for memory in (self.k, self.v):
            memory[hidden_NG] = torch.nan

    def _visible_slots(self, N: int) -> Tensor:
        """Return which slots some query sees, (N, G)."""
        case = self.case
        seen_NG = torch.zeros(N, self.case.G, dtype=torch.bool)
        for b, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
            if not count:
                continue
            seen_S = visible(start, count, start + count, case.sinks, case.window).any(0)
            for g, list_U in enumerate(self.units[b].expand(case.G, -1).long()):
                slots_S = (list_U[:, None] * PAGE + torch.arange(PAGE)).flatten()[: len(seen_S)]
                seen_NG[slots_S[seen_S], g] = True
        return seen_NG

    @property
    def lists(self) -> Tensor:
        return self.units if self.case.by_head else self.units[:, 0].contiguous()

    def by_kernel(self, position_shift: int = 0) -> tuple[Tensor, Tensor | None]:
        """Return mixed values (B, T, H, D) and mass (B, G, U).

        `position_shift` is added to the positions of the queries.
        """
        case = self.case
        E = PAGE * self.case.D
        keys, values = (torch.full((case.G, case.pages + 1, E), torch.nan, dtype=self.dtype) for _ in range(2))
        pages = native.Pages(keys, values, case.D)
        pages.write(torch.arange(len(self.k)), self.k, self.v)
        attn_out = torch.full_like(self.q, torch.nan)
        mass = torch.full((len(self.q), case.G, self.units.shape[2]), torch.nan) if case.weigh else None
        starts = [start + position_shift for start in case.starts]
        q_sinks = self.q_sinks if case.turned else None
        pages.attend(self.q, starts, case.counts, self.lists, attn_out, mass, q_sinks, case.sinks, case.window)
        return attn_out, mass

    def by_torch(self) -> tuple[Tensor, Tensor]:
        case = self.case
        rope = Rope(np.zeros(case.D // 2, np.float32), 1.0)
        config: Any = SimpleNamespace(
            layers=1, windows=[0], kv_heads=case.G, row_size=case.D, kv_int8=False, rope=rope,
            attention_sink_logits_LH=None,
        )  # fmt: skip
        memory = TorchKV(config, case.pages, "float64")
        memory.write(0, torch.arange(len(self.k)), *(x.double().nan_to_num().transpose(0, 1) for x in (self.k, self.v)))
        lists = PageTable(self.lists, case.starts, case.counts, sinks=case.sinks, window=case.window)
        q_sinks, kv = self.q_sinks.double() if case.turned else None, memory.view(0, 0, memory.keys_LGSD.shape[2])
        return attend_tables(self.q.double(), kv, lists, case.weigh, q_sinks)

    @property
    def bound(self) -> float:
        """Return the bound of the error, in units of the largest value.

        A score is a chain of D roundings of partial sums, divided by sqrt(D). Roundings of random signs grow with
        sqrt(D) (Higham and Mary 2019), so its error is about one rounding of the sum of |q| |k|. Weights are
        exponentials of scores, above and below the line of the fraction: twice that error, and some roundings for the
        exponentials themselves and for the sums over keys.
        """
        if self.dtype == torch.bfloat16:
            return BFLOAT16
        queries = torch.cat([self.q, self.q_sinks]).nan_to_num().abs().unflatten(2, (self.case.G, -1))
        sums = torch.einsum("btghd,ngd->btghn", queries, self.k.nan_to_num().abs())
        return ROUNDING * (2 * (sums.max().item() if sums.numel() else 0.0) + 16)

    def error(self, attn_out: Tensor, reference: Tensor) -> float:
        """Return the error in units of the largest value in memory; infinity where a value is NaN."""
        largest_value = self.v.float().nan_to_num().abs().max().item()
        error = (attn_out.double() - reference).abs().nan_to_num(torch.inf).max().item() if attn_out.numel() else 0.0
        return error / largest_value if largest_value else error


def agree(case: Case) -> None:
    default_level = native.level()
    try:
        for dtype in DTYPES:
            scene = Scene(case, dtype)
            reference, wanted_mass = scene.by_torch()
            for level in native.levels():
                native.use(level)
                attn_out, mass = scene.by_kernel()
                assert scene.error(attn_out, reference) <= scene.bound, (level, dtype)
                if mass is not None:
                    torch.testing.assert_close(mass, wanted_mass, atol=4e-5, rtol=4e-5)
    finally:
        native.use(default_level)


@given(case=cases())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_attention_random_call_equals_torch(case: Case) -> None:
    agree(case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@given(case=cases())
@settings(max_examples=3000, deadline=None)
def test_attention_long_random_call_equals_torch(case: Case) -> None:
    agree(case)


@pytest.mark.parametrize("level", native.levels())
def test_shifted_query_position_is_detected(level: str) -> None:
    """Negative control: shifted queries fail the comparison."""
    case = Case(64, 2, 2, 3, [20, 70], [3, 2], 1, True, 9, 16, 40, True, True, seed=1)
    default_level = native.level()
    native.use(level)
    try:
        for dtype in DTYPES:
            scene = Scene(case, dtype)
            reference, wanted_mass = scene.by_torch()
            attn_out, mass = scene.by_kernel(position_shift=-1)
            assert scene.error(attn_out, reference) > 10 * scene.bound
            assert not torch.allclose(mass, wanted_mass, atol=4e-5, rtol=4e-5)
    finally:
        native.use(default_level)

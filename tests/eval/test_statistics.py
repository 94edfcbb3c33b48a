"""Intervals: against scipy, and by how often they hold the truth."""

from __future__ import annotations

import pytest
import scipy.stats
import torch

from triforce.eval.scoring import interval, student


@pytest.mark.parametrize("freedom", [3, 5, 10, 31, 127, 1000])
def test_quantile_equals_student_t(freedom: int) -> None:
    assert student(freedom) == pytest.approx(scipy.stats.t.ppf(0.975, freedom), rel=0.01)


def test_interval_covers_mean_at_stated_rate() -> None:
    draw = torch.Generator().manual_seed(0)
    intervals = [interval(torch.randn(160, generator=draw) + 0.3, 16) for _ in range(2000)]
    covered = sum(estimate.low <= 0.3 <= estimate.high for estimate in intervals) / len(intervals)
    assert 0.935 < covered < 0.965
    assert intervals[0].blocks == 10


def test_short_blocks_give_narrow_intervals() -> None:
    draw = torch.Generator().manual_seed(0)
    slow_N = torch.randn(400, generator=draw).repeat_interleave(64)
    assert interval(slow_N, 16).neighbours > 0.5
    assert abs(interval(slow_N, 640).neighbours) < 0.35

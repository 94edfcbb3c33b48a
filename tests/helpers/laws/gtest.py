"""Hypothesis tests that report the smallest deviation they detect.

Shape suffixes: B texts, T tokens, V vocabulary, W windows.
"""

from __future__ import annotations

import torch
from scipy import optimize, stats
from torch import Tensor

ALPHA = 1e-4
POWER = 0.99
SPARSE = 5.0
"""Cells with a smaller expected count are merged."""


def surprise(observed: Tensor, expected: Tensor, groups: int = 1) -> float:
    """Return the p-value of a G-test of counts against expected ones. The totals of `groups` parts are fixed."""
    rare = expected < SPARSE
    if observed[rare].sum() > 0 and expected[rare].sum() == 0:
        return 0.0  # an impossible cell has counts
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]]).double()
    occupied = observed > 0
    g = 2 * (observed[occupied] * (observed[occupied] / expected[occupied]).log()).sum()
    return float(stats.chi2.sf(float(g), df=int((expected > 0).sum()) - groups))


def detectable(samples: int, df: int) -> float:
    """Return the least total variation that a test at level ALPHA finds with probability POWER, in any direction.

    A law at total variation d from the expected one has a chi-square divergence of at least (2 d)^2 (Cauchy-Schwarz),
    so that the statistic is non-central chi-square with non-centrality of at least 4 d^2 samples.
    """
    critical = stats.chi2.isf(ALPHA, df)
    noncentrality = optimize.brentq(lambda lam: stats.ncx2.sf(critical, df, lam) - POWER, 1e-3, 1e5)
    return float((noncentrality / (4 * samples)) ** 0.5)


def ranks(texts_BT: Tensor, laws_BTV: Tensor, likings_BTV: Tensor) -> Tensor:
    """Return Rosenblatt's transform of texts: independent uniforms, if each token follows its law given those before.

    A token's share of [0, 1) is its law, in ascending order of `likings`; the place within the share is drawn.
    """
    order_BTV = likings_BTV.argsort(-1)
    cdf_BTV = laws_BTV.gather(-1, order_BTV).cumsum(-1)
    place_BT1 = (order_BTV == texts_BT[..., None]).long().argmax(-1, keepdim=True)
    high_BT, share_BT = (
        x.squeeze(-1) for x in (cdf_BTV.gather(-1, place_BT1), laws_BTV.gather(-1, texts_BT[..., None]))
    )
    assert (share_BT > 0).all(), "a token of probability 0 was drawn"
    within_BT = torch.rand(texts_BT.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return high_BT - within_BT * share_BT


def window_surprise(ranks_BT: Tensor, first_token: int, window: int, bins: int) -> tuple[float, float]:
    """Return the p-value of uniform windows of tokens from `first_token` on, and the detectable total variation."""
    cells_BT = (ranks_BT[:, first_token:] * bins).long().clamp(0, bins - 1)
    windows_W = (cells_BT.unfold(1, window, window) * bins ** torch.arange(window)).sum(-1).flatten()
    cells = bins**window
    observed = torch.bincount(windows_W, minlength=cells)
    expected = torch.full((cells,), len(windows_W) / cells, dtype=torch.float64)
    return surprise(observed, expected), detectable(len(windows_W), cells - 1)

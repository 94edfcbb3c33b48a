"""Jumping scores, for which some queries of a tile rescale their sums in a block and others do not; and NaN.

A query's shift is raised where a score is 2^8 above it. Shifts must depend on a query's own keys alone, as all other
values do. Shape suffixes as in paged.py.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.helpers.fed_text import FedText, random_cuts
from tests.helpers.paged_kv import Paged, by_the_book, native, visible

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
torch.set_num_threads(1)

BLOCK = 64
RISE = 8
"""Difference of scores to base 2 from which a shift is raised."""
GAINS = [0.4, 1.0, 3.0, -1.0, 1.1, 0.05]
"""Gains of neighbouring queries, which multiply each step of the keys' level."""
STEPS = [0, 5, -20, 7.5, 8.5, 0.5, 20, -3, 7.9, 8.1]
"""Steps of the level between blocks, to base 2, for a gain of 1."""


def jumping_keys(S: int, G: int, h: int, D: int, dtype: torch.dtype) -> FedText:
    """Return keys whose product with a query is the level of their block times the query's gain, and some noise."""
    text = FedText(S, G, h, D, dtype)
    levels = torch.tensor([STEPS[i % len(STEPS)] for i in range(-(-S // BLOCK))]).cumsum(0)
    level_S = levels.repeat_interleave(BLOCK)[:S]
    gain_SH = torch.tensor([GAINS[i % len(GAINS)] for i in range(S * G * h)]).view(S, G * h)
    for x, along, noise in ((text.k_SGD, level_S[:, None], 0.1), (text.q_SHD, gain_SH, 1.0)):
        x.mul_(noise)
        x[..., 0] = along.to(dtype)
    text.q_SHD[..., 0] *= D**0.5 / 1.44269504
    return text


def block_tops(text: FedText) -> Tensor:
    """Return the largest score to base 2 of each block that all last queries see, (H, blocks), without noise."""
    full_block_tokens = text.S // BLOCK * BLOCK
    h = text.q_SHD.shape[1] // text.k_SGD.shape[1]
    keys_BG = text.k_SGD[:full_block_tokens:BLOCK, :, 0].float()
    return (text.q_SHD[-1, :, :1].float() * keys_BG.repeat_interleave(h, 1).T) / (text.q_SHD.shape[2] ** 0.5 / 1.4427)


@pytest.mark.parametrize(("S", "G", "h", "D"), [(650, 1, 3, 64), (330, 1, 7, 80), (330, 1, 1, 128), (1200, 1, 6, 16)])
def test_jumping_scores_keep_bits(S: int, G: int, h: int, D: int, dtype: torch.dtype) -> None:
    """Bits equal those of decoding token by token, and values are near float64."""
    text = jumping_keys(S, G, h, D, dtype)
    draw = random.Random(S)
    native.set_threads(1)
    single_pass = text.fed([0, S], seed=1, weigh=True)
    tail_tokens = 40
    singly = text.fed([0, *range(S - tail_tokens, S + 1)], seed=2)
    assert torch.equal(singly, single_pass)
    assert torch.equal(text.fed(random_cuts(S, [1, 2, 3, 5, 8, 16, 60], draw), seed=3), single_pass)
    reference, _ = by_the_book(text.q_SHD, text.k_SGD, text.v_SGD, visible(0, S, S))
    bound = (2.0**-7 if dtype == torch.bfloat16 else 3e-5) * float(text.v_SGD.abs().max())
    torch.testing.assert_close(single_pass.double(), reference, atol=bound, rtol=0)


def test_jumping_scores_raise_some_shifts(dtype: torch.dtype) -> None:
    """In one block some queries of a tile raise their shift and others do not, by more and by less than 8."""
    tops = block_tops(jumping_keys(650, 1, 6, 64, dtype))
    shift = tops[:, 0]
    raised = 0
    unraised = 0
    for top in tops.T[1:]:
        rises = top > shift + RISE
        raised += bool(rises.any() and not rises.all())
        unraised += bool(((top > shift) & ~rises).any())
        shift = torch.where(rises, top, shift)
    assert raised >= 4 and unraised >= 4


@pytest.mark.parametrize("tensor_name", ["keys", "values"])
@pytest.mark.parametrize("at", [3, 64, 130, 149, 1100])
def test_nan_reaches_queries_that_see_it(tensor_name: str, at: int, dtype: torch.dtype) -> None:
    """NaN reaches no other query: rows of one tile end before the key, or their window has left it."""
    S = at + 30
    T = 36
    h = 3
    D = 32
    T = min(T, S)
    kv = Paged(1, D, S // 16 + 2, dtype)
    row = kv.row(S)
    q_BTHD = kv.normal(1, T, h, D)
    (row.k_SGD if tensor_name == "keys" else row.v_SGD)[at, 0, 5] = torch.nan
    kv.fill(row.list_P, row.k_SGD, row.v_SGD)
    for window in (0, 17):
        attn_out = torch.empty_like(q_BTHD)
        kv.pages.attend(q_BTHD, [S - T], [T], row.list_P[None], attn_out, window=window)
        sees_T = visible(S - T, T, S, window=window)[:, at]
        assert sees_T.any() and not sees_T.all()
        lost_TD = attn_out[0].isnan().any(1)
        channels_D = torch.arange(D) == 5 if tensor_name == "values" else torch.ones(D, dtype=torch.bool)
        assert torch.equal(lost_TD, sees_T[:, None] & channels_D)
        assert torch.equal(attn_out[0].isnan().all(1), lost_TD)


def test_nan_query_loses_itself_alone(dtype: torch.dtype) -> None:
    S, T, h, D = 200, 5, 4, 64
    kv = Paged(1, D, 20, dtype)
    row, q_BTHD = kv.row(S), kv.normal(1, T, h, D)
    q_BTHD[0, 2, 1, 7] = torch.nan
    attn_out = torch.empty_like(q_BTHD)
    kv.pages.attend(q_BTHD, [S - T], [T], row.list_P[None], attn_out)
    lost_TH = torch.zeros(T, h, dtype=torch.bool)
    lost_TH[2, 1] = True
    assert torch.equal(attn_out[0].isnan().all(2), lost_TH) and torch.equal(attn_out[0].isnan().any(2), lost_TH)

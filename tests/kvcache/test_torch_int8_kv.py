"""Int8 KV on the torch path: rounded once, before any attention reads it, and copied from then on.

Shape suffixes as in docs/design/request.md.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.small_decoder import CLOSE, feed, small_decoder, text
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import pages_for
from triforce.backends.torch.int8_rows import numbers, rotated_head, rounded
from triforce.kvcache import FullView, PagePool

TEXT = text(60)


def views(count: int = 1) -> tuple[FullView, Decoder]:
    """Return a full view over int8 KV, and the decoder."""
    decoder = small_decoder()
    decoder.config = replace(decoder.config, kv_int8=True)
    pool = PagePool(decoder.config, count, count * pages_for(len(TEXT)), decoder.dtype)
    for b in range(count):
        pool.reserve(b, len(TEXT))
    return FullView(pool), decoder


def logits(cuts: list[int]) -> Tensor:
    """Return logits (T, V) of the text, fed from cut to cut."""
    view, decoder = views()
    return torch.cat([feed(decoder, view, [TEXT[start:stop]])[0] for start, stop in pairwise(cuts)])


def check_passes() -> None:
    """Check that a token's logits do not depend on the pass that it came in."""
    one_by_one = logits(list(range(len(TEXT) + 1)))
    torch.testing.assert_close(logits([0, 40, 41, len(TEXT)]), one_by_one, **CLOSE)


def check_copies() -> None:
    """Check that a copy in another row, and rows swapped in from the host, have the bits that were written."""
    view, decoder = views(3)
    feed(decoder, view, [TEXT, TEXT[:1], TEXT[:1]])
    view.fork(0, 1)
    view.swap_in(2, view.swap_out(0))
    for layer in range(decoder.config.layers):
        rows = [view.pool.span(layer, b, 0, len(TEXT)) for b in range(3)]
        for copied_row in rows[1:]:
            assert all(map(torch.equal, rows[0], copied_row))


def test_int8_logits_do_not_depend_on_passes() -> None:
    check_passes()


def test_int8_rows_are_copied_bit_for_bit() -> None:
    check_copies()


def check_error() -> None:
    """Check that logits are close to those of unrounded KV."""
    decoder = small_decoder()
    pool = PagePool(decoder.config, 1, pages_for(len(TEXT)), decoder.dtype)
    pool.reserve(0, len(TEXT))
    (exact,) = feed(decoder, FullView(pool), [TEXT])
    difference = (logits([0, len(TEXT)]) - exact).abs().max() / exact.std()
    assert 1e-4 < difference < 0.2


def test_int8_logits_are_nearly_those_of_unrounded_kv() -> None:
    check_error()


@pytest.mark.parametrize("D", [6, 64, 80, 96, 112, 128, 192])
def test_rotated_heads_spread_a_channel_over_its_block(D: int) -> None:
    """The rotation is an orthogonal, symmetric matrix of signs: applied twice it is the identity."""
    matrix_DD = rotated_head(torch.eye(D))
    size = D & -D
    torch.testing.assert_close(matrix_DD @ matrix_DD, torch.eye(D))
    assert torch.equal(matrix_DD, matrix_DD.T)
    blocks = torch.block_diag(*[torch.ones(size, size)] * (D // size))
    torch.testing.assert_close(matrix_DD.abs(), blocks / size**0.5)


def test_second_rounding_changes_rows() -> None:
    """Rows must not be rounded again: a copy would then hold the KV of another text."""
    rows = rounded(torch.randn(400, 16, generator=torch.Generator().manual_seed(0)))
    assert not torch.equal(rounded(numbers(rows)), rows)


@pytest.mark.parametrize("mutant", caught_in("test_int8_mutant_is_noticed"), ids=str)
def test_int8_mutant_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(AssertionError):
        check_passes()
        check_copies()
        check_error()

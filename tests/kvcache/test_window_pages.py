"""Pages of layers with a window: a row holds what its passes read, no more than it reserved, and no other row's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.family_models import LENGTH, WINDOW, family_model, paged_logits, texts
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.narrow_windows import narrow
from tests.helpers.tiny_checkpoint import save
from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import pages_for
from triforce.engine.model_loader import load
from triforce.errors import CacheError
from triforce.kvcache import PAGE, pool
from triforce.kvcache.pool import WindowPages, max_window_pages

WIDEST = 40
TOKENS = 400
PIECES = [[40, 3], [1, 40], [40, 7], [0, 40], [17, 1], [40, 0], [1, 40], [11, 19]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(family_model("gemma-3"), tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return load(folder, device="cpu", dtype="float32", context=LENGTH).decoder


def windows_of(rows: int, window: int = WINDOW) -> WindowPages:
    return WindowPages(window, rows * max_window_pages(window, WIDEST), WIDEST)


@pytest.mark.parametrize("slack", [0, 5, 64])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    window=st.integers(1, 70),
    passes=st.lists(st.tuples(st.integers(0, 1), st.integers(0, WIDEST), st.floats(0, 1)), max_size=40),
)
def test_window_pages_have_what_passes_read(slack: int, window: int, passes: list[tuple[int, int, float]]) -> None:
    """A share of each pass's tokens is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "SLACK", slack)
        pages = windows_of(2, window).new_rows(2)
        lengths = [0, 0]
        pages.tabulate(pages_for(TOKENS))
        for b in range(2):
            pages.reserve(b, TOKENS)
        for b, count, kept_share in passes:
            stop = min(lengths[b] + count, TOKENS)
            pages.prepare_pass(b, lengths[b], stop)
            mapped_pages = [[page for page in table if page] for table in pages.tables]
            assert all(len(row_pages) <= pages.reserved_pages(TOKENS) for row_pages in mapped_pages)
            assert (
                len({*mapped_pages[0], *mapped_pages[1]})
                == len(mapped_pages[0]) + len(mapped_pages[1])
                == pages.allocator.pages - len(pages.allocator.free)
            )
            window_start = max(0, lengths[b] - window + 1)
            assert all(pages.tables[b][window_start // PAGE : pages_for(stop)]), "and page 0 is scratch"
            assert not any(pages.tables[b][: max(0, window_start - slack) // PAGE]), (
                "what is behind the window is given back"
            )
            padded = pages.tables[b] + [0] * (pages_for(TOKENS) - len(pages.tables[b]))
            assert pages.pages_BP[b].tolist() == padded
            lengths[b] += int((stop - lengths[b]) * kept_share)
            assert pages.holds(b, lengths[b])


def test_pass_wider_than_promised_raises_cache_error() -> None:
    pages = windows_of(1).new_rows(1)
    pages.reserve(0, 10_000)
    pages.tabulate(pages_for(10_000))
    with pytest.raises(CacheError, match="needs more than the 69 window pages"):
        pages.prepare_pass(0, 0, 5_000)
    assert pages.tables == [[]]


def test_promises_beyond_all_pages_raise_cache_error() -> None:
    pages = windows_of(2).new_rows(3)
    for b in range(2):
        pages.reserve(b, 10_000)
    with pytest.raises(CacheError, match="0 pages of KV left"):
        pages.reserve(2, 1)
    pages.release(0)
    pages.reserve(2, 10_000)
    assert pages.allocator.reserved == pages.allocator.pages


def check_bits(decoder: Decoder) -> None:
    """Check that whole KV and window KV give the same bits, for any cut of a text into passes."""
    whole_BTV = paged_logits(decoder, texts(), [[1, 1]] * LENGTH)
    with narrow():
        for pieces in ([[1, 1]] * LENGTH, PIECES):
            windows = windows_of(2)
            assert torch.equal(paged_logits(decoder, texts(), pieces, windows), whole_BTV)
            assert len(windows.allocator.free) >= windows.allocator.pages - 2 * pages_for(WINDOW + WIDEST) - 2


@pytest.mark.skipif(dispatch.native is None, reason="without native kernels")
def test_window_pages_give_the_bits_of_whole_rows(decoder: Decoder) -> None:
    check_bits(decoder)


def test_window_pages_give_the_logits_of_whole_rows_on_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "native", None)
    decoder = load(folder, device="cpu", dtype="float32", context=LENGTH).decoder
    whole_BTV = paged_logits(decoder, texts(), PIECES)
    with narrow():
        torch.testing.assert_close(paged_logits(decoder, texts(), PIECES, windows_of(2)), whole_BTV)


@pytest.mark.skipif(dispatch.native is None, reason="without native kernels")
@pytest.mark.parametrize("mutant", caught_in("test_window_pages_mutant_is_noticed"), ids=str)
def test_window_pages_mutant_is_noticed(decoder: Decoder, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, CacheError, ValueError)):
        check_bits(decoder)

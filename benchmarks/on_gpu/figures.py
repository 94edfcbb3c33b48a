"""The pieces that make up each figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.on_gpu import decoding, hosted, others, passes
from benchmarks.on_gpu.piece import Piece, Setup

LLAMA_2 = ("llama-2-7b-128k", "llama-68m")
LLAMA_2_13B = ("llama-2-13b-128k", "llama-68m")
LLAMA_3 = ("llama-3.1-8b", "llama-68m-128256")
THOUSAND = 1024


def on_chip(setup: Setup) -> Iterator[Piece]:
    (shape, draft), (context, *_) = _names(setup, LLAMA_2), setup.contexts or [122_880]
    yield from passes.pieces(setup, shape, draft, context)
    yield from decoding.pieces(setup, shape, draft, context)
    yield from others.transformers_pieces(setup, shape, context)


def real_text(setup: Setup) -> Iterator[Piece]:
    return others.shipped_pair(setup, setup.contexts or [32 * THOUSAND, 128 * THOUSAND])


def batches(setup: Setup) -> Iterator[Piece]:
    shape, draft = _names(setup, LLAMA_2)
    for rows, context in zip((2, 6, 10), setup.contexts or [56 * THOUSAND, 19 * THOUSAND, 12 * THOUSAND], strict=False):
        yield from decoding.pieces(setup, shape, draft, context, rows)


def grouped_queries(setup: Setup) -> Iterator[Piece]:
    (shape, draft), (context, *_) = _names(setup, LLAMA_3), setup.contexts or [128 * THOUSAND]
    yield from passes.pieces(setup, shape, draft, context)
    for rows in (1, 6):
        yield from decoding.pieces(setup, shape, draft, context, rows)


def under_the_papers_cards(setup: Setup) -> Iterator[Piece]:
    """24 GiB for 7B, 48 GiB for 13B."""
    for own, cap in ((LLAMA_2, 24), (LLAMA_2_13B, 48)):
        (shape, draft), (context, *_) = _names(setup, own), setup.contexts or [122_880]
        yield from hosted.pieces(setup, shape, draft, context, cap << 30)


def longer_than_the_device(setup: Setup) -> Iterator[Piece]:
    for own, context in ((LLAMA_2, 256 * THOUSAND), (LLAMA_3, 512 * THOUSAND)):
        shape, draft = _names(setup, own)
        yield from hosted.pieces(setup, shape, draft, (setup.contexts or [context])[0])


FIGURES: dict[str, Callable[[Setup], Iterator[Piece]]] = {
    "a": on_chip, "b": real_text, "c": under_the_papers_cards, "d": batches, "e": grouped_queries,
    "f": longer_than_the_device,
}  # fmt: skip


def _names(setup: Setup, own: tuple[str, str]) -> tuple[str, str]:
    """The target's and the draft's shape."""
    return setup.shape or own[0], setup.draft or own[1]

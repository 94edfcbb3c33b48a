"""Which pieces make up each figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.on_gpu import decoding, others, passes
from benchmarks.on_gpu.piece import Piece, Setup
from triforce.errors import RequestError

LLAMA_2 = ("llama-2-7b-128k", "llama-68m")
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


def offloaded(setup: Setup) -> Iterator[Piece]:
    raise RequestError(
        "this figure needs the store that keeps KV on the host (the offload issue), and the pool has none on a GPU yet"
    )


FIGURES: dict[str, Callable[[Setup], Iterator[Piece]]] = {
    "a": on_chip, "b": real_text, "c": offloaded, "d": batches, "e": grouped_queries, "f": offloaded,
}  # fmt: skip


def _names(setup: Setup, own: tuple[str, str]) -> tuple[str, str]:
    """The target's and the draft's shape."""
    return setup.shape or own[0], setup.draft or own[1]

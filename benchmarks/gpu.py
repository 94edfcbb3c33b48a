"""The paper's figures on a GPU, each in pieces that can be run apart, and a lease of ten minutes, which comes first.

    python -m benchmarks.gpu lease
    python -m benchmarks.gpu a --max-seconds 460

The lease is what waits for a GPU, in order of worth (see `on_gpu/lease.py`): a file a part, `lease_<part>.json`. With
--device cpu all of it is rehearsed in small, in minutes, and rows go to build/lease.

Each figure is a file of rows, `benchmarks/results/gpu_<figure>.json`, written after every piece; what is there already
is not measured again, so a figure that takes longer than a session is finished by running the same command once more.
A piece that does not come to an end is passed by with --only, which names others.

a  on one chip, Llama-2-7B-128K's shape at 122K: passes against the measured limits, plain decoding, TriForce
b  the shipped pair with real text at 32K and 128K
c  the KV cache on the host, under the memory of the paper's cards
d  batches: 2 texts of 56K, 6 of 19K, 10 of 12K
e  Llama-3.1-8B's shape at 128K, batches of 1 and 6
f  with offload, 256K and 512K
g  kernels by themselves: tiles and splits of attention, products with packed weights, draws
h  e's shape over int8 KV, and its attention by itself
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from benchmarks import study
from benchmarks.on_gpu import lease, others, ours
from benchmarks.on_gpu.lease import LLAMA_2, LLAMA_3
from benchmarks.on_gpu.piece import Names, Piece, Setup, capped
from benchmarks.on_gpu.row_file import RowFile
from triforce.bench.results_file import provenance
from triforce.engine.model_loader import resolve_device
from triforce.errors import RequestError

RESULTS = Path(__file__).parent / "results"
REHEARSED = Path(__file__).parents[1] / "build" / "lease"
"""Where rows of a CPU go."""
LEASE = "lease"
LLAMA_2_13B = ("llama-2-13b-128k", "llama-68m")
PAPER = 122_880
THOUSAND = 1024
OFFLOADED_TOKENS = 32
"""Tokens of each decoding at most, with KV on the host: plainly, each takes as long as the whole KV on the bus."""


def on_chip(setup: Setup) -> Iterator[Piece]:
    names, (context, *_) = setup.names(LLAMA_2), setup.contexts or [PAPER]
    yield from ours.passes(setup, names, context)
    yield from ours.decodings(setup, names, context)
    yield others.transformers_piece(setup, names[0], context)


def real_text(setup: Setup) -> Iterator[Piece]:
    return others.shipped_pair(setup, setup.contexts or [32 * THOUSAND, 128 * THOUSAND])


def under_the_papers_cards(setup: Setup) -> Iterator[Piece]:
    """24 GiB for 7B, 48 GiB for 13B."""
    for figure_names, cap in ((LLAMA_2, 24), (LLAMA_2_13B, 48)):
        for piece in offloaded(setup, figure_names, PAPER):
            yield replace(piece, what=f"{piece.what}, {cap} GiB", run=partial(capped, setup, cap << 30, piece))


def batches(setup: Setup) -> Iterator[Piece]:
    for rows, context in zip((2, 6, 10), setup.contexts or [56 * THOUSAND, 19 * THOUSAND, 12 * THOUSAND], strict=False):
        yield from ours.decodings(setup, setup.names(LLAMA_2), context, rows)


def grouped_queries(setup: Setup) -> Iterator[Piece]:
    names, (context, *_) = setup.names(LLAMA_3), setup.contexts or [128 * THOUSAND]
    yield from ours.passes(setup, names, context)
    for rows in (1, 6):
        yield from ours.decodings(setup, names, context, rows)


def longer_than_the_device(setup: Setup) -> Iterator[Piece]:
    yield from offloaded(setup, LLAMA_2, 256 * THOUSAND)
    yield from offloaded(setup, LLAMA_3, 512 * THOUSAND)


def offloaded(setup: Setup, figure_names: Names, default_context: int) -> Iterator[Piece]:
    """Yield the pieces with KV on the host: full passes, decoding, and other engines."""
    setup, names = replace(setup, tokens=min(setup.tokens, OFFLOADED_TOKENS)), setup.names(figure_names)
    context = (setup.contexts or [default_context])[0]
    yield from ours.offloaded_passes(setup, names, context)
    yield from ours.offloaded_decodings(setup, names, context)
    yield from others.offloaded(setup, names[0], context)


def kernels_alone(setup: Setup) -> Iterator[Piece]:
    """Triton is imported when this is asked for: it is not everywhere."""
    from benchmarks.on_gpu import kernels, packed_products

    for figure_names, context in ((LLAMA_2, PAPER), (LLAMA_3, 128 * THOUSAND)):
        yield from kernels.attentions(setup, setup.names(figure_names)[0], (setup.contexts or [context])[0])
    yield from packed_products.products(setup, setup.names(LLAMA_3)[0])
    yield from kernels.draws(setup)


def int8_kv(setup: Setup) -> Iterator[Piece]:
    from benchmarks.on_gpu import kernels

    setup = replace(setup, kv_int8=True)
    names, (context, *_) = setup.names(LLAMA_3), setup.contexts or [128 * THOUSAND]
    yield from ours.passes(setup, names, context)
    yield from ours.decodings(setup, names, context)
    yield from kernels.attentions(setup, names[0], context)


FIGURES: dict[str, Callable[[Setup], Iterator[Piece]]] = {
    "a": on_chip, "b": real_text, "c": under_the_papers_cards, "d": batches, "e": grouped_queries,
    "f": longer_than_the_device, "g": kernels_alone, "h": int8_kv,
}  # fmt: skip


def measure(options: argparse.Namespace) -> int | None:
    """Measure the pieces of a figure that are missing, while there is time. Raises TriforceError."""
    if options.device != "cpu" and not torch.cuda.is_available():
        raise RequestError("there is no CUDA device here; docs/contributing/gpu-runs.md lists what waits for one")
    began = perf_counter()
    device = resolve_device(options.device)
    is_lease = options.figure == LEASE
    setup = Setup(device, options.shape, options.draft, options.contexts, options.tokens, options.kv_memory)
    options.out = _folder(options.out, setup)
    if not setup.on_gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton, which looks only then
    common = {"command": options.command, **provenance(device)}
    if options.max_seconds is None:
        options.max_seconds = lease.SECONDS if is_lease else 460
    if is_lease:
        return lease.run(options, setup, common)
    file = RowFile(options.out / f"gpu_{options.figure}.json")
    for piece in FIGURES[options.figure](setup):
        if file.find(piece) or options.only not in piece.what:
            continue
        if perf_counter() - began > options.max_seconds:
            print(f"not yet: {' '.join(map(str, piece.key))} and what follows; run this again", flush=True)
            return None
        row = {"figure": options.figure, **piece.labels, **piece.run(), **common}
        file.put(piece, row)
        print(json.dumps(row), flush=True)
    return None


def _folder(out: Path | None, setup: Setup) -> Path:
    """Return the folder of the rows. Raises RequestError where those of a rehearsal would go among results."""
    if setup.on_gpu:
        return out or RESULTS
    if out and out.resolve() == RESULTS.resolve():
        raise RequestError(f"rows of a CPU are none of a GPU's figures; name another folder than {out} with --out")
    return out or REHEARSED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("figure", choices=[LEASE, *sorted(FIGURES)])
    parser.add_argument("--max-seconds", type=float, help=f"begin no piece after so long (460; lease: {lease.SECONDS})")
    parser.add_argument("--only", default="", metavar="TEXT", help="pieces with this in what they are called")
    parser.add_argument("--out", type=Path, help="folder of the rows (benchmarks/results; build/lease with a CPU)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", help="instead of the figure's own (see triforce.bench.shapes)")
    parser.add_argument("--draft", help="the draft's shape, with --shape")
    parser.add_argument("--contexts", type=lambda text: [int(n) for n in text.split(",")], help="instead of its own")
    parser.add_argument("--kv-memory", default="auto", help="KV that stays on the device in c, f and the lease")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each decoding")


main = study.command("gpu", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())

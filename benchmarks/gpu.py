"""The paper's figures on a GPU, each in pieces that can be run apart.

    python -m benchmarks.gpu a --max-seconds 460

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
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from benchmarks import study
from benchmarks.on_gpu import others, ours
from benchmarks.on_gpu.piece import Names, Piece, Row, Setup
from triforce.cli.bench.report import machine
from triforce.engine.precision import resolve_device
from triforce.errors import RequestError

RESULTS = Path(__file__).parent / "results"
LLAMA_2 = ("llama-2-7b-128k", "llama-68m")
LLAMA_2_13B = ("llama-2-13b-128k", "llama-68m")
LLAMA_3 = ("llama-3.1-8b", "llama-68m-128256")
PAPER, THOUSAND = 122_880, 1024
HOSTED = 32
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
    for own, cap in ((LLAMA_2, 24), (LLAMA_2_13B, 48)):
        for piece in hosted(setup, own, PAPER):
            yield replace(piece, what=f"{piece.what}, {cap} GiB", run=partial(_capped, setup, cap << 30, piece))


def _capped(setup: Setup, cap: int, piece: Piece) -> Row:
    """Measure as on a device of so many bytes."""
    if not setup.on_gpu:
        return piece.run()
    torch.cuda.empty_cache()  # what is kept for later counts
    total = torch.cuda.mem_get_info(setup.device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), setup.device)
    try:
        return piece.run()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, setup.device)


def batches(setup: Setup) -> Iterator[Piece]:
    for rows, context in zip((2, 6, 10), setup.contexts or [56 * THOUSAND, 19 * THOUSAND, 12 * THOUSAND], strict=False):
        yield from ours.decodings(setup, setup.names(LLAMA_2), context, rows)


def grouped_queries(setup: Setup) -> Iterator[Piece]:
    names, (context, *_) = setup.names(LLAMA_3), setup.contexts or [128 * THOUSAND]
    yield from ours.passes(setup, names, context)
    for rows in (1, 6):
        yield from ours.decodings(setup, names, context, rows)


def longer_than_the_device(setup: Setup) -> Iterator[Piece]:
    yield from hosted(setup, LLAMA_2, 256 * THOUSAND)
    yield from hosted(setup, LLAMA_3, 512 * THOUSAND)


def hosted(setup: Setup, own: Names, usual: int) -> Iterator[Piece]:
    """With KV on the host: full passes, decoding, and what others do."""
    setup, names = replace(setup, tokens=min(setup.tokens, HOSTED)), setup.names(own)
    context = (setup.contexts or [usual])[0]
    yield from ours.hosted_passes(setup, names, context)
    yield from ours.hosted_decodings(setup, names, context)
    yield from others.hosted(setup, names[0], context)


def kernels_alone(setup: Setup) -> Iterator[Piece]:
    """Triton is imported when this is asked for: it is not everywhere."""
    from benchmarks.on_gpu import kernels

    for own, context in ((LLAMA_2, PAPER), (LLAMA_3, 128 * THOUSAND)):
        yield from kernels.attentions(setup, setup.names(own)[0], (setup.contexts or [context])[0])
    yield from kernels.products(setup, setup.names(LLAMA_3)[0])
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


def measure(options: argparse.Namespace) -> None:
    """Measure the pieces of a figure that are missing, while there is time. Raises TriforceError."""
    if options.device != "cpu" and not torch.cuda.is_available():
        raise RequestError("there is no CUDA device here; docs/gpu.md says what waits for one")
    began, file = perf_counter(), options.out / f"gpu_{options.figure}.json"
    rows: list[Row] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    device = resolve_device(options.device)
    setup = Setup(device, options.shape, options.draft, options.contexts, options.tokens, options.kv_memory)
    where = torch.cuda.get_device_name(device) if setup.on_gpu else machine()
    common = {"machine": where, "command": options.command}
    known = {(row["what"], row["shape"], row["context"]) for row in rows}
    for piece in FIGURES[options.figure](setup):
        if piece.key in known or options.only not in piece.what:
            continue
        if perf_counter() - began > options.max_seconds:
            print(f"not yet: {' '.join(map(str, piece.key))} and what follows; run this again", flush=True)
            return
        row = {"figure": options.figure, **piece.labels, **piece.run(), **common}
        rows.append(row)
        known.add(piece.key)
        print(json.dumps(row), flush=True)
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("figure", choices=sorted(FIGURES))
    parser.add_argument("--max-seconds", type=float, default=460, help="begin no piece after so long")
    parser.add_argument("--only", default="", metavar="TEXT", help="pieces with this in what they are called")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", help="instead of the figure's own (see triforce.bench.shapes)")
    parser.add_argument("--draft", help="the draft's shape, with --shape")
    parser.add_argument("--contexts", type=lambda text: [int(n) for n in text.split(",")], help="instead of its own")
    parser.add_argument("--kv-memory", default="auto", help="KV that stays on the device in c and f")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each decoding")


main = study.command("gpu", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())

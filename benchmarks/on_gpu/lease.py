"""All that waits for a GPU, in ten minutes of one: parts in order of worth, each a file of rows.

Checks of the machine come first, and nothing follows one that fails. A piece that fails leaves its error, memory is
given back, and the next one is measured; a run that finds an error tries that piece once more. With a device that is
lost the run ends, and the same command goes on behind what is there.
"""

from __future__ import annotations

import argparse
import gc
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch

from benchmarks.on_gpu import machine_checks, others, ours
from benchmarks.on_gpu.piece import Names, Piece, Row, Setup, capped
from benchmarks.on_gpu.row_file import RowFile

LLAMA_2 = ("llama-2-7b-128k", "llama-68m")
LLAMA_3 = ("llama-3.1-8b", "llama-68m-128256")
TINY: Names = ("tiny", "tiny-draft")
THOUSAND = 1024
OFFLOADED_CONTEXT, CARD = 60 * THOUSAND, 24 << 30
"""Context with KV on the host, 30 GiB (most of it takes half a second on the bus); bytes of the device it is for."""
SPECULATIVE_TOKENS, VERIFIED_TOKENS = (6, 12, 16), 48
"""Draft tokens for a verification, and tokens of whole verifications of each decoding."""
SECONDS = 510
"""Seconds within which the last piece begins, of ten minutes."""
TRIES = 2
"""Runs that try a piece which fails."""
SAID = "found", "device_seconds", "speedup", "failures", "captures", "same_text_as_ar", "registers", "spilled"
"""Fields of a row that are said, beside its seconds."""
FAILED, LOST = 1, 3
"""Exit codes: a check or a piece has failed; the device is lost."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some pieces, whose rows are in the file `lease_<name>.json`, and seconds of a GPU in which the last one begins.

    gate: all of it is measured, whatever the time, and nothing else unless it passes at this commit.
    """

    name: str
    seconds: float
    pieces: Callable[[Setup], Iterator[Piece]]
    gate: bool = False


class LostDeviceError(Exception):
    """A device that answers nothing any more, in this process."""


def _offloaded(setup: Setup) -> Iterator[Piece]:
    """7B's shape with KV on the host, at the paper's acceptance: drafts of several lengths, whole verifications."""
    setup, names = replace(setup, tokens=min(setup.tokens, VERIFIED_TOKENS)), setup.names(LLAMA_2)
    context = (setup.contexts or [OFFLOADED_CONTEXT])[0]
    for speculative_tokens in SPECULATIVE_TOKENS:
        for piece in ours.offloaded_decodings(setup, names, context, speculative_tokens):
            if piece.acceptance == "paper":
                run = partial(capped, setup, CARD, piece)
                yield replace(piece, what=f"{piece.what}, {CARD >> 30} GiB", run=run)


def _shipped_pair(setup: Setup) -> Iterator[Piece]:
    return others.wall_clock(setup, (setup.contexts or [32 * THOUSAND])[0])


def _token_time(setup: Setup) -> Iterator[Piece]:
    from benchmarks.on_gpu import token_time

    for context in setup.contexts or [16 * THOUSAND, 128 * THOUSAND]:
        yield from token_time.parts(setup, setup.names(LLAMA_3), context)


def _four_bits(setup: Setup) -> Iterator[Piece]:
    from benchmarks.on_gpu import packed_products

    return packed_products.of_four_bits(setup, setup.names(LLAMA_3)[0])


def _int8_tiles(setup: Setup) -> Iterator[Piece]:
    from benchmarks.on_gpu import attention_trials

    return attention_trials.int8_tiles(setup, setup.names(LLAMA_3)[0], (setup.contexts or [128 * THOUSAND])[0])


def _prefill(setup: Setup) -> Iterator[Piece]:
    from benchmarks.on_gpu import attention_trials

    for context in setup.contexts or [16 * THOUSAND, 64 * THOUSAND]:
        yield from attention_trials.prefill(setup, setup.names(LLAMA_3)[0], context)


def _states(setup: Setup) -> Iterator[Piece]:
    from benchmarks.on_gpu import token_time

    return token_time.states(setup, setup.names(LLAMA_3), (setup.contexts or [16 * THOUSAND])[0])


PARTS = (
    Part("doctor", 0, machine_checks.doctor, gate=True), Part("int8_tests", 90, machine_checks.int8_tests),
    Part("offloaded", 160, _offloaded), Part("shipped_pair", 45, _shipped_pair), Part("token_time", 60, _token_time),
    Part("four_bits", 45, _four_bits), Part("int8_tiles", 45, _int8_tiles), Part("prefill", 20, _prefill),
    Part("states", 20, _states),
)  # fmt: skip


def rehearsed(setup: Setup) -> Setup:
    """Return the setup of a lease, in small where that is on a CPU and nothing else is said."""
    if setup.on_gpu:
        return setup
    (shape, draft), kv_memory = setup.names(TINY), "3MiB" if setup.kv_memory == "auto" else setup.kv_memory
    contexts = setup.contexts or [256]
    tokens = min(setup.tokens, 8)
    return replace(setup, shape=shape, draft=draft, contexts=contexts, tokens=tokens, kv_memory=kv_memory)


def run(options: argparse.Namespace, setup: Setup, common: Row) -> int:
    """Measure what is missing of all parts, while there is time, and return the exit code."""
    end = perf_counter() + options.max_seconds
    failed = 0
    setup = rehearsed(setup)
    try:
        for part in PARTS:
            part_end = perf_counter() + part.seconds if setup.on_gpu else end
            failed += _measure(part, options, setup, common, min(end, part_end))
            if part.gate and failed:
                print("a check failed, so nothing is measured; `triforce doctor` says what to look at", flush=True)
                return FAILED
    except LostDeviceError as error:
        print(f"the device is lost ({error}); rows are kept: run the same command again", flush=True)
        return LOST
    if failed:
        print(f"{failed} pieces failed: their rows have the error; run this again to try them once more", flush=True)
    return FAILED if failed else 0


def _measure(part: Part, options: argparse.Namespace, setup: Setup, common: Row, end: float) -> int:
    """Measure what is missing of a part; returns how many of its pieces have failed, now or before."""
    file = RowFile(options.out / f"lease_{part.name}.json")
    failed = 0
    for piece in _listed(part, setup):
        row = file.find(piece)
        if not (row and _settled(part, row, common)) and (part.gate or options.only in f"{part.name}: {piece.what}"):
            if perf_counter() > end and not part.gate:
                print(f"not yet: {part.name}, {piece.what} and what follows of it; run this again", flush=True)
                return failed
            tries = row.get("tries", 1) + 1 if row and "error" in row else 1
            piece_rows, device_lost = _measured_row(piece, setup)
            row = {"figure": part.name, **piece.labels, **piece_rows, "tries": tries, **common}
            file.put(piece, row)
            print(_line(part, row), flush=True)
            if device_lost:
                raise LostDeviceError(device_lost)
        if row and "error" in row:
            failed += 1
            if part.gate:
                return failed
    return failed


def _line(part: Part, row: Row) -> str:
    """Return the line that is printed of a row; the file holds the whole row."""
    took = f"{1e3 * row['seconds']:.3f} ms" if row["seconds"] else row.get("left_out", row.get("error"))
    details = {name: row[name] for name in SAID if row.get(name) is not None}
    return " | ".join(
        [part.name, row["what"], str(row["context"]), str(took), *(f"{k} {v}" for k, v in details.items())]
    )


def _settled(part: Part, row: Row, common: Row) -> bool:
    """Return whether a row stands: a check's if it passed at this commit, others unless they are to be tried again."""
    if part.gate:
        return "error" not in row and row.get("commit") == common.get("commit")
    return "error" not in row or row["tries"] >= TRIES


def _listed(part: Part, setup: Setup) -> list[Piece]:
    """Return the pieces of a part; where it cannot even name them, one that says why."""
    try:
        return [*part.pieces(setup)]
    except Exception as error:  # of a package that is not there, say
        return [Piece(part.name, "none", 0, partial(_raise, error))]


def _raise(error: Exception) -> Row:
    raise error


def _measured_row(piece: Piece, setup: Setup) -> tuple[Row, str]:
    """Return the row of a piece, or its error; and the error of a lost device, else an empty text."""
    try:
        return piece.run(), ""
    except Exception as error:  # whatever a driver, a compiler or a kernel may raise
        first_line = (str(error).splitlines() or [""])[0]
        row: Row = {"seconds": None, "fraction_of_limit": None, "speedup": None}
        row |= {
            "error": f"{type(error).__name__}: {first_line}",
            "traceback": traceback.format_exc().splitlines()[-12:],
        }
    device_lost = _device_error(setup)  # behind the block, whose frames held what was in memory
    if not device_lost:
        setup.drop_models()
        gc.collect()
        torch.cuda.empty_cache()
    return row, device_lost


def _device_error(setup: Setup) -> str:
    """Return the error of a lost device: it stays, whatever the device is asked. Empty if the device works."""
    if setup.on_gpu:
        try:
            torch.cuda.synchronize(setup.device)
        except Exception as error:
            return (str(error).splitlines() or [type(error).__name__])[0]
    return ""

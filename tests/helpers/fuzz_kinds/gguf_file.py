"""Cases of GGUF files: header parts with other bytes, numbers or parts, and truncated files."""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from random import Random

from tests.helpers.case_outcome import Limits
from tests.helpers.forked_folder import made_apart
from tests.helpers.fuzz_kinds.config_json import ASKED, commanded, generated
from tests.helpers.gguf_parts import HEAD, GgufParts, write_mixed

NUMBERS = [0, 1, 2, 3, 5, 8, 64, 255, 257, 4096, 65_535, 1 << 20, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
ABSURD = [*NUMBERS, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0x7FC00000, 0x7F800000, 0xBF800000]
"""Counts, sizes and offsets that are off by little or much, or huge; the last are NaN, infinity and -1."""
LIMITS = Limits(bytes=128 << 20)
"""Limits of a case. A valid one takes a third of the memory."""


@cache
def whole() -> GgufParts:
    return GgufParts(made_apart(write_mixed) / "model.gguf")


def write_case(data: bytes, folder: Path) -> None:
    (folder / "model.gguf").write_bytes(data)


WHOLES = [lambda folder: write_case(whole().data, folder)]


def make_case(random: Random, folder: Path) -> None:
    write_case(damaged(random), folder)


def damaged(random: Random) -> bytes:
    """Return the file with one to four changes in its header, or truncated."""
    parts = whole()
    data = bytearray(parts.data)
    for _ in range(random.choice((1, 1, 2, 4))):
        begin, end = random.choice(random.choice(parts.entries)) if random.random() < 0.9 else random.choice(HEAD)
        match random.randrange(8):
            case 0:
                data[random.randrange(begin, end)] = random.randrange(256)
            case 1:
                data[random.randrange(begin, end)] ^= 1 << random.randrange(8)
            case 2:
                source = random.randrange(parts.header)
                data[begin:end] = data[source : source + end - begin]
            case 3:
                del data[random.randrange(len(data)) :]
                break
            case _:
                size = min(end - begin, 8)
                data[begin : begin + size] = struct.pack("<Q", random.choice(ABSURD))[:size]
    return bytes(data)


def open_case(folder: Path) -> int:
    """Generate a text; if that works, run `info`, too."""
    file = str(folder / "model.gguf")
    return generated([file, "--draft", "none", "--mode", "ar", *ASKED]) or commanded(["info", file])

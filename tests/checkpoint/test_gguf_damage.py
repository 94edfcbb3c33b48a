"""Broken GGUF files, asked for a text: one line, exit code 2, and no more memory than a whole one takes."""

from __future__ import annotations

import resource
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import pytest
from gguf import GGUFReader

from tests.helpers.gguf_models import MIXED, write_model
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from triforce.cli import main

Span = tuple[int, int]
"""Where something begins in a file, and where it ends."""
NUMBERS = [0, 1, 2, 3, 5, 8, 64, 255, 257, 4096, 65_535, 1 << 20, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
ABSURD = [*NUMBERS, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0x7FC00000, 0x7F800000, 0xBF800000]
"""Counts, sizes and offsets that are off by little, by much or without end; the last are NaN, infinity and -1."""

HEAD = [(0, 4), (4, 8), (8, 16), (16, 24)]
"""Magic, version, and two counts."""
SIZES = ["block_count", "embedding_length", "feed_forward_length", "vocab_size"]
SIZES += ["attention.head_count", "attention.head_count_kv", "rope.dimension_count"]


class Whole:
    """A model's file that can be read, and what its header is made of."""

    def __init__(self, folder: Path) -> None:
        sizes = dict(intermediate_size=256, num_hidden_layers=1, max_position_embeddings=128)
        file = write_model(folder, "Q4_K", MIXED, **sizes).gguf
        reader = GGUFReader(file)
        self.data, self.header, self.broken = file.read_bytes(), int(reader.data_offset), folder / "broken.gguf"
        origin = reader.data.__array_interface__["data"][0]
        self.entries: list[list[Span]] = []
        """Of each entry of metadata and each description of a tensor its parts: lengths, names, types, values."""
        for field in [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]:
            places = [part.__array_interface__["data"][0] - origin for part in field.parts]
            spans = [(at, at + part.nbytes) for at, part in zip(places, field.parts, strict=True) if part.nbytes]
            self.entries.append([(at, end) for at, end in spans if 0 <= at < self.header])
        self.tensors = [
            (int(tensor.data_offset), int(tensor.data_offset + tensor.n_bytes)) for tensor in reader.tensors
        ]

    def answer(self, data: bytes, capsys: pytest.CaptureFixture[str], command: str = "generate") -> int:
        """The exit code for a file of such bytes, after a look at what is said."""
        self.broken.write_bytes(data)
        asked = ["-p", "the cat", "-n", "2", "--mode", "ar", "--draft", "none", "-q"] if command == "generate" else []
        code = main([command, str(self.broken), *asked])
        said = capsys.readouterr().err
        assert code in (0, 2)
        assert code == 0 or (said.startswith("triforce: error: ") and said.count("\n") == 1 and len(said) < 1000), said
        return code


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp("damage"))


@pytest.fixture(autouse=True)
def bounded(whole: Whole, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Reads a file that is whole, and holds the memory of all others against what that took."""
    assert whole.answer(whole.data, capsys) == whole.answer(whole.data, capsys, "info") == 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


@pytest.mark.slow
def test_cut_files_exit_2(whole: Whole, capsys: pytest.CaptureFixture[str]) -> None:
    """At the ends of the header's first numbers, within and behind parts of entries, and in each tensor."""
    places = {0, 1, 4, 8, 16, 24, whole.header, *(place for spans in whole.entries for place in spans[0])}
    for spans in whole.entries:
        places |= {at for begin, end in spans[:12] for at in ((begin + end) // 2, end)}
    places |= {at for begin, end in whole.tensors for at in (begin, begin + 1, (begin + end) // 2, end - 1)}
    assert len(places) > 150
    assert [at for at in sorted(places) if whole.answer(whole.data[:at], capsys) != 2] == []


def test_absurd_numbers_exit_2(whole: Whole, capsys: pytest.CaptureFixture[str]) -> None:
    """Each dimension, type and offset of each tensor, and both counts."""
    spans = HEAD[2:]
    for begin, end in (part for entry in whole.entries[-len(whole.tensors) :] for part in entry[2:]):
        spans += [(at, min(at + 8, end)) for at in range(begin, end, 8)]  # dimensions are one part
    for at, end in spans:
        data = bytearray(whole.data)
        data[at:end] = b"\xff" * (end - at)
        assert whole.answer(bytes(data), capsys) == 2


def test_sizes_that_do_not_fit_exit_2(whole: Whole, capsys: pytest.CaptureFixture[str]) -> None:
    """They are off by little, and all that is asked of each alone is right."""
    for key in SIZES:
        at = whole.data.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
        size = int.from_bytes(whole.data[at : at + 4], "little")
        for other in {0, 1, size - 1, size + 1, size // 2, size * 2, 1 << 31, (1 << 32) - 1} - {size}:
            data = whole.data[:at] + other.to_bytes(4, "little") + whole.data[at + 4 :]
            assert whole.answer(data, capsys) == 2, (key, other)


def damaged(whole: Whole, random: Random) -> bytes:
    """The file with one to four changes in its header, or without its end."""
    data = bytearray(whole.data)
    for _ in range(random.choice((1, 1, 2, 4))):
        begin, end = random.choice(random.choice(whole.entries)) if random.random() < 0.9 else random.choice(HEAD)
        match random.randrange(8):
            case 0:
                data[random.randrange(begin, end)] = random.randrange(256)
            case 1:
                data[random.randrange(begin, end)] ^= 1 << random.randrange(8)
            case 2:
                other = random.randrange(whole.header)
                data[begin:end] = data[other : other + end - begin]
            case 3:
                del data[random.randrange(len(data)) :]
                return bytes(data)
            case _:
                size = min(end - begin, 8)
                data[begin : begin + size] = struct.pack("<Q", random.choice(ABSURD))[:size]
    return bytes(data)


def refused(whole: Whole, count: int, capsys: pytest.CaptureFixture[str]) -> int:
    """How many of so many damaged files are; of the others `info` tells, too."""
    random, answer = Random(7), partial(whole.answer, capsys=capsys)
    found = 0
    for _ in range(count):
        data = damaged(whole, random)
        found += answer(data) == 2 or answer(data, command="info") == 2
    return found


def test_damaged_files_exit_2(whole: Whole, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(whole, 400, capsys) > 300


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_damaged_files_exit_2(whole: Whole, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(whole, 10_000, capsys) > 7000


@pytest.mark.parametrize("mutant", caught_in("test_damage_mutant_is_noticed"), ids=str)
def test_damage_mutant_is_noticed(
    whole: Whole, mutant: Mutant, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, IndexError, ValueError, OverflowError, RuntimeError, struct.error)):
        test_absurd_numbers_exit_2(whole, capsys)
        test_sizes_that_do_not_fit_exit_2(whole, capsys)
        test_cut_files_exit_2(whole, capsys)

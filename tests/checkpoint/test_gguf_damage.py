"""Broken GGUF files, asked for a text: one line, exit code 2, and no more memory than for an intact file."""

from __future__ import annotations

import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.gguf_parts import HEAD, GgufParts, write_mixed
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from triforce.cli import main

SIZES = ["block_count", "embedding_length", "feed_forward_length", "vocab_size"]
SIZES += ["attention.head_count", "attention.head_count_kv", "rope.dimension_count"]


class IntactFile(GgufParts):
    """A model's file that can be read, and a broken one beside it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(write_mixed(folder))
        self.broken = folder / "broken.gguf"

    def answer(self, data: bytes, capsys: pytest.CaptureFixture[str], command: str = "generate") -> int:
        """Return the exit code for a file of these bytes, and check what is printed."""
        self.broken.write_bytes(data)
        arguments = (
            ["-p", "the cat", "-n", "2", "--mode", "ar", "--draft", "none", "-q"] if command == "generate" else []
        )
        code = main([command, str(self.broken), *arguments])
        errors = capsys.readouterr().err
        assert code in (0, 2)
        assert code == 0 or (
            errors.startswith("triforce: error: ") and errors.count("\n") == 1 and len(errors) < 1000
        ), errors
        return code


@pytest.fixture(scope="module")
def intact_file(tmp_path_factory: pytest.TempPathFactory) -> IntactFile:
    return IntactFile(tmp_path_factory.mktemp("damage"))


@pytest.fixture(autouse=True)
def bounded(intact_file: IntactFile, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Read an intact file, and hold the memory of all broken files against what that took."""
    assert intact_file.answer(intact_file.data, capsys) == intact_file.answer(intact_file.data, capsys, "info") == 0
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before < 64 * 1024  # KiB


@pytest.mark.slow
def test_cut_files_exit_2(intact_file: IntactFile, capsys: pytest.CaptureFixture[str]) -> None:
    """Cuts lie at the ends of the header's first numbers, within and behind parts of entries, and in each tensor."""
    places = {0, 1, 4, 8, 16, 24, intact_file.header, *(place for spans in intact_file.entries for place in spans[0])}
    for spans in intact_file.entries:
        places |= {at for begin, end in spans[:12] for at in ((begin + end) // 2, end)}
    places |= {at for begin, end in intact_file.tensors for at in (begin, begin + 1, (begin + end) // 2, end - 1)}
    assert len(places) > 150
    assert [at for at in sorted(places) if intact_file.answer(intact_file.data[:at], capsys) != 2] == []


def test_absurd_numbers_exit_2(intact_file: IntactFile, capsys: pytest.CaptureFixture[str]) -> None:
    """Each dimension, type and offset of each tensor is changed, and so are both counts."""
    spans = HEAD[2:]
    for begin, end in (part for entry in intact_file.entries[-len(intact_file.tensors) :] for part in entry[2:]):
        spans += [(at, min(at + 8, end)) for at in range(begin, end, 8)]  # the dimensions are one part
    for at, end in spans:
        data = bytearray(intact_file.data)
        data[at:end] = b"\xff" * (end - at)
        assert intact_file.answer(bytes(data), capsys) == 2


def test_sizes_that_do_not_fit_exit_2(intact_file: IntactFile, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes are off by little, and each is valid on its own."""
    for key in SIZES:
        at = intact_file.data.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
        size = int.from_bytes(intact_file.data[at : at + 4], "little")
        for bad_size in {0, 1, size - 1, size + 1, size // 2, size * 2, 1 << 31, (1 << 32) - 1} - {size}:
            data = intact_file.data[:at] + bad_size.to_bytes(4, "little") + intact_file.data[at + 4 :]
            assert intact_file.answer(data, capsys) == 2, (key, bad_size)


@pytest.mark.parametrize("mutant", caught_in("test_damage_mutant_is_noticed"), ids=str)
def test_damage_mutant_is_noticed(
    intact_file: IntactFile, mutant: Mutant, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, IndexError, ValueError, OverflowError, RuntimeError, struct.error)):
        test_absurd_numbers_exit_2(intact_file, capsys)
        test_sizes_that_do_not_fit_exit_2(intact_file, capsys)
        test_cut_files_exit_2(intact_file, capsys)

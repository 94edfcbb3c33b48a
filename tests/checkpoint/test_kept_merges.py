"""Merges of a vocabulary are computed once. Stored merges of other vocabularies, or damaged ones, are not used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from triforce.checkpoint.gguf import merges
from triforce.checkpoint.gguf.merges import Merges

TEXTS, SCORES, KINDS = ["a", "b", "ab"], np.array([0.0, -1.0, -2.0]), [1, 1, 1]
MERGES = np.array([[0, 1]], np.int32)


class Finder:
    """Counts how often merges are computed."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Merges:
        self.calls += 1
        return MERGES


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Finder:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(merges, "FEWEST_TOKENS", 3)
    return Finder()


def kept_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "triforce" / "merges").iterdir())


def test_merges_of_a_vocabulary_are_found_once(find: Finder) -> None:
    for _ in range(3):
        assert np.array_equal(merges.cached_merges(TEXTS, SCORES, KINDS, find), MERGES)
    assert find.calls == 1


def test_merges_of_another_vocabulary_are_not_taken(find: Finder) -> None:
    merges.cached_merges(TEXTS, SCORES, KINDS, find)
    merges.cached_merges(TEXTS, SCORES[::-1].copy(), KINDS, find)
    merges.cached_merges(TEXTS, SCORES, [1, 1, 4], find)
    merges.cached_merges(["a", "ba", "b"], SCORES, KINDS, find)
    merges.cached_merges(["ab", "a", "b"], SCORES, KINDS, find)
    assert find.calls == 5


@pytest.mark.parametrize("damage", ["emptied", "cut", "changed", "a folder"])
def test_damaged_merges_are_found_anew(find: Finder, tmp_path: Path, damage: str) -> None:
    merges.cached_merges(TEXTS, SCORES, KINDS, find)
    (file,) = kept_files(tmp_path)
    content = file.read_bytes()
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    else:
        file.write_bytes({"emptied": b"", "cut": content[:-1], "changed": content[:-1] + b"\x01"}[damage])
    for calls in (2, 3 if damage == "a folder" else 2):
        assert np.array_equal(merges.cached_merges(TEXTS, SCORES, KINDS, find), MERGES)
        assert find.calls == calls


def test_merges_of_a_small_vocabulary_are_not_kept(find: Finder, tmp_path: Path) -> None:
    merges.cached_merges(TEXTS[:2], SCORES[:2], KINDS[:2], find)
    assert not (tmp_path / "triforce").exists()

"""Evaluation texts are kept apart from training: shared windows are found, wherever they lie."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from recipes.pair import apart


def tokens(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 8192, length, dtype=np.uint16)


@pytest.mark.parametrize("place", [0, 70, 99, 100, 101, 950])
@pytest.mark.parametrize("length", [49, 50, 53])
def test_overlap_of_fifty_tokens_is_found(place: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "AT_ONCE", 100)
    text = tokens(500, 1)
    training = tokens(1003, 2)
    place = min(place, len(training) - length)
    training[place : place + length] = text[200 : 200 + length]
    overlaps = apart.compare({"text": text, "other": tokens(80, 3)}, [tokens(30, 4), training])
    windows = max(0, length - 49)
    assert overlaps["text"] == {"windows": 451, "shared": windows, "tokens": length if windows else 0}
    assert overlaps["other"]["shared"] == 0
    uncut_tokens = apart.cut(training, [text, tokens(80, 3)])
    assert (
        uncut_tokens.tolist() == (np.delete(training, slice(place, place + length)) if windows else training).tolist()
    )


def test_overlap_hashes_depend_on_order() -> None:
    a = tokens(60, 5)
    b = a.copy()
    b[[3, 4]] = b[[4, 3]]
    assert len(apart.hashes(a)) == 11
    assert (apart.hashes(a) == apart.hashes(b)).tolist() == [False] * 5 + [True] * 6
    assert len(apart.hashes(a[:10])) == 0


def test_overlap_across_cut_is_checked_again() -> None:
    text = tokens(500, 1)
    training = tokens(1000, 2)
    training[300:360] = text[100:160]
    training[360:430] = text[300:370]
    training[430:490] = text[160:220]
    uncut_tokens = apart.cut(training, [text])
    assert apart.compare({"text": text}, [uncut_tokens])["text"]["shared"] == 0
    assert uncut_tokens.tolist() == [*training[:300], *training[490:]]


def test_overlap_with_eval_ends_run(tmp_path: Path) -> None:
    (tmp_path / "tokens" / "eval").mkdir(parents=True)
    text = tokens(10_000, 1)
    training = tokens(5_000, 2)
    np.save(tmp_path / "tokens" / "eval" / "book.npy", text)
    np.save(tmp_path / "tokens" / "books.train.npy", training)
    apart.run(tmp_path)
    assert json.loads((tmp_path / "apart.json").read_text())["book"]["shared"] == 0
    (tmp_path / "apart.json").unlink()
    training[:50] = text[:50]
    np.save(tmp_path / "tokens" / "books.heldout.npy", training)
    with pytest.raises(ValueError, match="book"):
        apart.run(tmp_path)
    assert not (tmp_path / "apart.json").exists()

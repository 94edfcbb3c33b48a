"""Cuts of tokens equal those of looking up each part."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from triforce.checkpoint.gguf import merges as module
from triforce.checkpoint.gguf.merges import token_cuts


def cuts(texts: list[str], scores: list[float]) -> list[tuple[str, str]]:
    token_ids = token_cuts(texts, np.array(scores))
    sides = zip(token_ids.text_M.tolist(), token_ids.left_M.tolist(), token_ids.right_M.tolist(), strict=True)
    pairs = [(texts[text], (texts[left_id], texts[right_id])) for text, left_id, right_id in sides]
    assert all(text == prefix + suffix for text, (prefix, suffix) in pairs)
    return [pair for _, pair in pairs]


@pytest.mark.parametrize("bits", [4, module.SLOT_BITS])
def test_cuts_of_equal_scores_are_all_there_are(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """bits: with few bits most texts share the slots of others."""
    monkeypatch.setattr(module, "SLOT_BITS", bits)
    random = Random(7)
    texts = list({"".join(random.choices("ab🙂é▁", k=random.randrange(1, 7))) for _ in range(600)})
    vocabulary = set(texts)
    all_cuts = [(text[:at], text[at:]) for text in texts for at in range(1, len(text))]
    all_cuts = [(prefix, suffix) for prefix, suffix in all_cuts if prefix in vocabulary and suffix in vocabulary]
    assert len(all_cuts) > 300 and cuts(texts, [0.0] * len(texts)) == all_cuts


def test_cut_between_characters_that_meet_before_is_left_out() -> None:
    texts = ["t", "h", "e", "th", "he", "the"]
    assert cuts(texts, [0, 0, 0, -1, -2, -3]) == [("t", "h"), ("h", "e"), ("th", "e")]
    assert cuts(texts, [0, 0, 0, -2, -1, -3]) == [("t", "h"), ("h", "e"), ("t", "he")]
    joined_cuts = [("t", "he"), ("th", "e")]
    assert cuts(texts, [0, 0, 0, -1, -1, -3]) == [("t", "h"), ("h", "e"), *joined_cuts]


def test_cuts_of_single_characters_are_none() -> None:
    assert cuts(["a", "b", "🙂"], [0.0] * 3) == []

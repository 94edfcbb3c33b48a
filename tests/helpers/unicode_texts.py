"""Texts of all kinds of characters, which tokenizers are likely to cut differently."""

from __future__ import annotations

import sys
import unicodedata
from random import Random

KINDS = ("L", "M", "N", "P", "S", "Z", "C")
PIECES = [
    *("'s", "'S", "'re", "'RE", "'\u017f", "'ll", "I'LL", "don't", "DON'T", " the", "The", "ÀB", "éa", "İi", "\u01c5"),
    *("1234567", "\u0663\u0664\u0665", "½", "\u2167", "\r\n", "\n\n", "  \n  ", " " * 7, "\t\t", "...", "!!!", "__"),
    *("//", "/* x */", "日本語", "🙂\u200d🙂", "a\u0301e\u0308", "\u2028", "\u3000", "\u200b", "\ufeff", "\x1c"),
    *("<|im_end|>", "<s>", "</s>", "<|endoftext|>", "<0x0A>", "▁", "▁▁x", "Ġ", "Ċ"),
]
"""Pieces of text with special rules in tokenizers."""


def characters() -> dict[str, list[str]]:
    """Return all assigned characters by the first letter of their category, without surrogates and private ones."""
    by_category: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for character in map(chr, range(1, sys.maxunicode + 1)):
        category = unicodedata.category(character)
        if category not in ("Cs", "Co", "Cn"):
            by_category[category[0]].append(character)
    return by_category


def unicode_texts(count: int, seed: int = 0) -> list[str]:
    """Return texts of up to 40 pieces: characters of any kind or of few, ASCII, and `PIECES`."""
    random = Random(seed)
    by_category = characters()
    ascii = [chr(code) for code in range(32, 127)]
    pools = [*by_category.values(), ascii, ascii, PIECES, PIECES]
    texts = []
    for _ in range(count):
        chosen_pools = random.sample(pools, random.choice((1, 2, 3, len(pools))))
        texts.append("".join(random.choice(random.choice(chosen_pools)) for _ in range(random.randrange(1, 40))))
    return texts


def every_character() -> list[str]:
    """Return each character between letters, after a blank, twice, and between digits."""
    return [
        f"a{character}b {character}{character} 1{character}2" for group in characters().values() for character in group
    ]

"""Compares token ids of GGUF files with llama.cpp's: python -m scripts.gguf_ids FILE... --texts FOLDER > FIGURES.

LLAMA_CPP_PYTHON names an interpreter with llama-cpp-python. Texts are cut into pieces of 8,000 characters. Random texts
of all kinds of characters follow, and then every character of Unicode. Exit code 1: ids differ, or the special tokens
around a text differ.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

from tests.helpers.unicode_texts import every_character, unicode_texts
from tests.helpers.vocabularies import compare
from triforce.cli.bench.setup import own_texts
from triforce.cli.text_files import read_texts
from triforce.errors import ModelError

PIECE = 8000


def main() -> int:
    parser = ArgumentParser(description="Compare token ids of GGUF files with llama.cpp's.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="GGUF files; they need no weights")
    parser.add_argument("--texts", nargs="+", metavar="PATH", help="UTF-8 files, or folders of them")
    parser.add_argument("--fuzz", type=int, default=20_000, metavar="N", help="number of random texts")
    options = parser.parse_args()
    whole_texts = list((read_texts(options.texts) if options.texts else own_texts()).values())
    pieces = [text[start : start + PIECE] for text in whole_texts for start in range(0, len(text), PIECE)]
    texts = pieces + unicode_texts(options.fuzz) + every_character()
    print(
        f"{sum(len(text.encode()) for text in whole_texts) / 1e6:.1f} MB, and {len(texts) - len(pieces):,} short texts"
    )
    return max([_report(file, texts) for file in options.files])


def _report(file: Path, texts: list[str]) -> int:
    """Print a line for a file, and some differences. Returns 1 if ids differ, or special tokens around a text."""
    try:
        comparison = compare(file, texts)
    except ModelError as error:
        print(f"{error}"[:200])
        return 0
    print(f"{file.name}: {comparison.tokens:,} ids; {len(comparison.texts)} of {len(texts):,} texts differ", flush=True)
    for line in [*map(ascii, comparison.texts[:4]), *comparison.ends, *comparison.pieces[:4]]:
        print(f"    {line[:200]}")
    return int(bool(comparison.texts or comparison.ends))


if __name__ == "__main__":
    sys.exit(main())

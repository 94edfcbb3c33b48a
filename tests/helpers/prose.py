"""Counts words and long sentences of pages: python -m tests.helpers.prose [--at REVISION] [FILE ...].

Without files: README.md, CONTRIBUTING.md and docs/. --at counts them as they were in a commit. Code and comments do not
count; an item of a list and a cell of a table are paragraphs of their own. Exit code 1 where a sentence has more than
40 words, or a paragraph more than 120.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SENTENCE = 40
PARAGRAPH = 120
END = re.compile(r"""(?<=[.!?])(?<!\bal\.)(?<!\be\.g\.)(?<!\bi\.e\.)[)"'`*]*\s+""")


class Count(NamedTuple):
    """Counts of one page."""

    words: int
    sentences: list[str]
    """Sentences that are too long."""
    paragraphs: list[str]


def paragraphs(text: str) -> Iterator[str]:
    """Yield the prose of a page of Markdown, without headings, code and comments."""
    text = re.sub(r"<!--.*?-->|^```.*?^```$|^~~~.*?^~~~$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?: {4}|\t).*$", "", text, flags=re.MULTILINE)  # indented code
    text = re.sub(r"^#.*$|^\s*\|?[-:| ]+\|?\s*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.)\s)", text):
        for part in re.split(r"\s*\|\s*", block) if block.lstrip().startswith("|") else [block]:
            if prose := " ".join(re.sub(r"^\s*(?:[-*+>]|\d+\.)\s+", "", part).split()):
                yield prose


def count(text: str) -> Count:
    """Return the counts of a page of Markdown."""
    text_paragraphs = list(paragraphs(text))
    sentences = [sentence for paragraph in text_paragraphs for sentence in END.split(paragraph)]
    return Count(
        sum(len(paragraph.split()) for paragraph in text_paragraphs),
        [sentence for sentence in sentences if len(sentence.split()) > SENTENCE],
        [paragraph for paragraph in text_paragraphs if len(paragraph.split()) > PARAGRAPH],
    )


def pages() -> list[Path]:
    """Return the pages for readers, README first."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--at", metavar="REVISION", help="count the pages of a commit")
    options = parser.parse_args(arguments)
    if options.at:
        listed = _git("ls-tree", "-r", "--name-only", options.at, "--", "README.md", "CONTRIBUTING.md", "docs")
        texts = {n: _git("show", f"{options.at}:{n}") for n in listed.splitlines() if n.endswith(".md")}
    else:
        files = [file.resolve() for file in options.files] or pages()
        texts = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}
    counts = {name: count(text) for name, text in texts.items()}
    for name, page_count in counts.items():
        print(f"{page_count.words:7,} words, {len(page_count.sentences):3} long sentences  {name}")
        for long in [*page_count.sentences, *page_count.paragraphs]:
            print(f"        {len(long.split())}: {long[:100]}")
    print(
        f"{sum(c.words for c in counts.values()):7,} words, {sum(len(c.sentences) for c in counts.values()):3} in all"
    )
    return int(any(page_count.sentences or page_count.paragraphs for page_count in counts.values()))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    raise SystemExit(main())

"""Markdown pages for tests: code blocks, links, headings, and names of files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


RUN = "run"
RUN_AS_SERVER = "run as server"
RUN_SLOWLY = "run slowly"
MARKS = (RUN, RUN_AS_SERVER, RUN_SLOWLY)


class Block(NamedTuple):
    """A fenced block of code."""

    language: str
    code: str
    mark: str
    """One of `MARKS`, as the comment `<!-- run -->` in front of the block has it; "" without a comment."""
    line: int
    """The line of the page where the fence opens."""


def pages() -> list[Path]:
    """Return README.md, CONTRIBUTING.md and all pages of docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> Iterator[Block]:
    fenced = r"(?:^<!-- (run\b.*?) -->\n)?(^)```(\w*)\n(.*?)^```$"
    for block in re.finditer(fenced, text, re.DOTALL | re.MULTILINE):
        yield Block(block[3], block[4], block[1] or "", text.count("\n", 0, block.start(2)) + 1)


def commands(code: str) -> Iterator[str]:
    """Yield the lines of a shell block, continued ones joined."""
    for line in code.replace("\\\n", " ").split("\n"):
        if line.strip():
            yield line


def prose(text: str) -> str:
    """Return a page without its fenced code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(text))


def anchors(text: str) -> set[str]:
    """Return the names of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)) for heading in headings)
    return {re.sub(r"\s", "-", name.strip().lower()) for name in plain}


def files(text: str) -> set[str]:
    """Return paths of files, and of folders that are not built, that a page names as code."""
    named = re.findall(r"`((?:[\w.]+/)+\w+\.(?:py|cpp|hpp|toml|sh|json))`", text)
    return {*named, *re.findall(r"`(tests/\w+|(?!build/)(?:\w+/){2,})`", text)}


def repeated_files(text: str) -> set[str]:
    """Return paths of files that a row of a table, or the list of a page's files, names twice."""
    lines = [line for line in text.splitlines() if line.startswith(("| ", "**Files.**"))]
    named = [re.findall(r"`((?:\w+/)+\w+\.(?:py|cpp|hpp))`", line) for line in lines]
    return {file for cell_files in named for file in cell_files if cell_files.count(file) > 1}

"""Tables for terminals and for model cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill

from triforce.errors import printable


@dataclass(frozen=True, slots=True)
class Table:
    """A title, a note on the meaning of the figures, and rows of cells under a header."""

    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def plain(self) -> str:
        """Return the table as text in aligned columns: the first to the left, numbers to the right."""
        lines = [[printable(cell) for cell in line] for line in (self.header, *self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        aligned = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
        return "\n".join([f"== {printable(self.title)} ==", *aligned, fill(self.note, 100)])

    def markdown(self) -> str:
        """Return the table in Markdown, with its title as a heading and its note."""
        return f"### {self.title}\n\n{self.grid()}\n\n{self.note}"

    def grid(self) -> str:
        """Return the cells in Markdown, without title and note."""
        lines = [self.header, ["---"] + ["---:"] * (len(self.header) - 1), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def percent(share: float | None) -> str:
    """Return a share as text in percent; an empty text for None."""
    return "" if share is None else f"{share:.0%}"


def tokens(count: int) -> str:
    """Return a number of tokens as text: 512, 2K, 32K."""
    return f"{count // 1024}K" if count >= 1024 and count % 1024 == 0 else f"{count:,}"

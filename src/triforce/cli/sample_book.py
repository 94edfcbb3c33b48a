"""The book that comes with triforce, for whoever names no text."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

BOOK, TITLE = "dracula.txt", "Dracula, by Bram Stoker"


def book_file() -> Path:
    """Return the file of the book."""
    return Path(str(resources.files("triforce"))) / "assets" / BOOK


def sample_book() -> str:
    """Return the text of the book."""
    return book_file().read_text(encoding="utf-8")

"""Values of arguments that more than one command refuses in the same words."""

from __future__ import annotations

import argparse

from triforce.errors import RequestError
from triforce.interface.user_paths import user_path

MOST_MINUTES = 365 * 24 * 60
EMPTY = "an empty name"
"""What a shell makes of a variable that is not set."""

STANDARD = "-"
"""Name that stands for stdin where a text is read, and for stdout where answers are written."""


def path(text: str) -> str:
    """Return the name of a file or a folder. Raises ArgumentTypeError for what can be none, `-` among it."""
    if text == STANDARD:
        raise argparse.ArgumentTypeError("'-' is stdin or stdout, and this takes a name; ./- names a file called -")
    return path_or_standard(text)


def path_or_standard(text: str) -> str:
    """Return the name of a file, or `-`; `~` is expanded, which shells leave as it is behind `=`.

    Raises ArgumentTypeError for what can be none.
    """
    try:
        return str(user_path(name(text))) if text == "~" or (text.startswith("~") and "/" in text) else name(text)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def name(text: str) -> str:
    """Return the name of a model, a file or a folder. Raises ArgumentTypeError for what can be none."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{ascii(text) if text else EMPTY} names no file and no folder")
    return text


def some_text(text: str) -> str:
    """Return a text. Raises ArgumentTypeError for one of no characters."""
    if not text:
        raise argparse.ArgumentTypeError("the text is empty; give at least one character")
    return text


def minutes(text: str) -> float:
    """Return how long something may take. Raises ValueError or ArgumentTypeError for what is no such time."""
    number = float(text)
    if not 0 < number <= MOST_MINUTES:
        raise argparse.ArgumentTypeError(f"{number:g}: give more than 0, and {MOST_MINUTES:,} (a year) at most")
    return number

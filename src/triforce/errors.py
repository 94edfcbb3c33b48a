"""Mistakes that a user can put right. The command line prints the text of any of these and exits with code 2."""

from __future__ import annotations

from collections.abc import Iterable
from unicodedata import category

LONGEST = 900
"""Characters of the longest message. Its end says what to do, so that the middle is left out of longer ones."""
UNPRINTABLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Categories of characters that a terminal may obey, or not show."""


def escaped(text: str) -> str:
    """Return a text, of which strangers may have written a part, on one line that a terminal only shows."""
    text = _shortened(text)
    if text.isprintable():
        return text
    return _shortened("".join(ascii(char)[1:-1] if category(char) in UNPRINTABLE else char for char in text))


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST * 2 // 3]} ... {text[-LONGEST // 3 :]}"


class TriforceError(Exception):
    """A user's mistake. The text says what is wrong and what to do about it, on one line (see `escaped`)."""

    def __str__(self) -> str:
        return escaped(super().__str__())


class ModelError(TriforceError):
    """A model that cannot be found, read or supported, or two models that do not fit together."""


class RequestError(TriforceError):
    """A prompt or a sampling parameter that cannot be served. `param` is the name of the parameter, where it is one."""

    def __init__(self, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.param = param


class CacheError(TriforceError):
    """A saved KV cache that cannot be read, written or used with this model."""


class CacheWarning(RuntimeWarning):
    """A KV cache that was to be saved is not, and the text goes on. Of the command line it is an error: exit code 2."""


class RankError(TriforceError):
    """Processes that share a model have lost one of them, or do not agree."""


def suggest(typed: str, names: Iterable[str]) -> str:
    """Return the nearest name in brackets, to stand behind what was typed; nothing where none is near."""
    from difflib import get_close_matches  # only mistakes need it

    nearest = get_close_matches(typed, list(names), 1)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def printable(text: object) -> str:
    """Return a name or a path to stand in a line: as it is, or with escapes and in quotes where it does not print."""
    return str(text) if str(text).isprintable() else ascii(str(text))

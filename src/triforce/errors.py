"""Mistakes that a user can put right. The command line prints the text of any of these and exits with code 2.

An error is raised once, and names an argument by `argument`; the door that its user came through says how the user
writes that: `context=64` in Python, `--context 64` on the command line.

A request is refused, in this order, by: the server's doors (`server/http_server.py`, `server/security.py`: connections,
host, key, size of the body; `server/body_parser.py`: JSON; `server/request_base.py`, `server/schemas.py`: fields;
`server/service.py`: what the model cannot do, sizes of answers), `interface/sampling_params.py` (values),
`engine/inputs.py` (the prompt: empty, beyond the context, ids), `server/engine_thread.py` (a full queue), and
`engine/scheduler.py: Scheduler.add` (more KV than there is). `server/errors.py: refusal_for` makes a status of each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from unicodedata import category

LONGEST = 900
"""Characters of the longest message. Its end says what to do, so that the middle is left out of longer ones."""
SIMILARITY = 0.75
"""Least similarity of names that are taken for one another: one letter in four may be another."""
UNPRINTABLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Categories of characters that a terminal may obey, or not show."""
Wording = Callable[[str, str | None], str]
"""How users write an argument, given its name in Python, and perhaps the `repr` of a value."""
OPTIONS = {"grammar": "--json-schema, --regex or --choice", "ranks": "--tp", "stop_token_ids": "--stop-token-id"}
"""Options whose names are not those of the arguments."""
_ARGUMENT = re.compile("\x02(\\w+)(?:=([^\x03]*))?\x03")


def argument(name: str, *value: object) -> str:
    """Return an argument of `LLM`, its methods or `SamplingParams`, perhaps with a value, to stand in an error."""
    return f"\x02{name}{''.join(f'={setting!r}' for setting in value)}\x03"


def as_keyword(name: str, value: str | None) -> str:
    """Return an argument as Python has it."""
    return name if value is None else f"{name}={value}"


def as_option(name: str, value: str | None) -> str:
    """Return an argument as the command line has it."""
    flag = OPTIONS.get(name) or f"--{name.replace('_', '-')}"
    shown = {None: "", "True": "", "None": " none"}
    return flag + shown.get(value, f" {value}".replace("'", ""))


_wording: Wording = as_keyword


@contextmanager
def wording(words: Wording) -> Iterator[None]:
    """Have arguments in texts of errors written in these words, in the whole process."""
    global _wording
    outer_wording = _wording
    _wording = words
    try:
        yield
    finally:
        _wording = outer_wording


def worded(text: str, words: Wording | None = None) -> str:
    """Return a text with its arguments in these words; None are those of the process."""
    words = words or _wording
    return _ARGUMENT.sub(lambda match: words(match[1], match[2]), text)


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
        return self.worded()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def worded(self, words: Wording | None = None) -> str:
        """Return the text with its arguments in these words; None are those of the process."""
        return escaped(worded(super().__str__(), words))

    @property
    def arguments(self) -> list[str]:
        """Names of the arguments in the text."""
        return [match[1] for match in _ARGUMENT.finditer(super().__str__())]


class ModelError(TriforceError):
    """A model that cannot be found, read or supported, or two models that do not fit together."""


class RequestError(TriforceError):
    """A prompt or a sampling parameter that cannot be served."""


class ContextLengthError(RequestError):
    """A prompt that the context of the model has no room for. It is never cut."""


class CacheError(TriforceError):
    """A saved KV cache that cannot be read, written or used with this model."""


class CacheWarning(RuntimeWarning):
    """A KV cache that was to be saved is not, and the text goes on. Of the command line it is an error: exit code 2."""


class RankError(TriforceError):
    """Processes that share a model have lost one of them, or do not agree."""


def require_bool(name: str, value: object) -> None:
    """Raise RequestError unless an argument is True or False: words such as "no" would count as True."""
    if not isinstance(value, bool):
        raise RequestError(f"{argument(name)} must be True or False, not {value!r}")


def require_integer(name: str, value: object, minimum: int, maximum: int | None = None) -> None:
    """Raise RequestError unless an argument is an integer that is at least, and perhaps at most, so large."""
    if (
        not isinstance(value, Integral)
        or isinstance(value, bool)
        or not minimum <= int(value) <= (maximum or int(value))
    ):
        allowed = f"from {minimum} to {maximum}" if maximum else f"of at least {minimum}"
        raise RequestError(f"{argument(name)} must be an integer {allowed}, not {value!r}")


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Have a TriforceError, or a TypeError, begin with its place among several things."""
    try:
        yield
    except (TriforceError, TypeError) as error:
        error.args = (f"{place}: {error.args[0] if error.args else ''}",)
        raise


def nearest(typed: str, names: Iterable[str]) -> str | None:
    """Return the name that was probably meant; None where none is near. Dashes before names do not count."""
    from difflib import get_close_matches  # only mistakes need it

    by_word = {name.lstrip("-"): name for name in names}
    word = typed.lstrip("-")
    transposed = [name for name in by_word if sorted(name) == sorted(word)]
    words = transposed or get_close_matches(word, by_word, 1, SIMILARITY)
    return by_word[words[0]] if words else None


def suggest(typed: str, names: Iterable[str]) -> str:
    """Return the nearest name in brackets, to stand behind what was typed; nothing where none is near."""
    name = nearest(typed, names)
    return f" (did you mean {name}?)" if name else ""


def printable(text: object) -> str:
    """Return a name or a path to stand in a line: as it is, or with escapes and in quotes where it does not print."""
    return str(text) if str(text).isprintable() else ascii(str(text))


def unreadable(file: str | bytes | Path, error: OSError) -> ModelError:
    """Return the error of a file that cannot be read. One that is closed to the user is not to be fetched again."""
    closed = isinstance(error, PermissionError)
    advice = "have its owner let you read it, or name another model" if closed else "download it again"
    return ModelError(f"{os.fsdecode(file)} cannot be read ({error.strerror or error}); {advice}")

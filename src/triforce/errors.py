"""Errors that a user can correct. The command line prints the text of any of them and exits with code 2.

The text of an error marks each argument with the function `argument`. The entry point then formats the argument as
its own users write it: `context=64` in Python, `--context 64` on the command line.

The modules that check a request, in their order:

- `server/http_server.py`, `server/security.py`: connections, host, key, and size of the body.
- `server/body_parser.py`: JSON.
- `server/request_base.py`, `server/schemas.py`, `server/turns.py`: fields.
- `server/request_parser.py`: features of the model, and sizes of answers.
- `interface/sampling_params.py`: values.
- `engine/inputs.py`: the prompt, which may be empty, too long or of invalid ids.
- `server/engine_thread.py`: the length of the queue.
- `engine/scheduler.py: Scheduler.add`: KV capacity.

`server/errors.py: refusal_for` maps each error to a status.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from unicodedata import category

MAX_MESSAGE_CHARACTERS = 900
"""Maximal length of a message in characters. Longer messages are cut in the middle: their end says what to do."""
SIMILARITY = 0.75
"""Minimal similarity of a suggested name to the typed one: one letter in four may differ."""
UNPRINTABLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories of characters that a terminal may interpret or not display."""
ArgumentFormat = Callable[[str, str | None], str]
"""Function from the Python name of an argument, and the `repr` of its value or None, to the text that users write."""
OPTIONS = {"grammar": "--json-schema, --regex or --choice", "ranks": "--tp", "stop_token_ids": "--stop-token-id"}
"""Command line options by argument, where the names differ."""
_ARGUMENT = re.compile("\x02(\\w+)(?:=([^\x03]*))?\x03")


def argument(name: str, *value: object) -> str:
    """Return an argument of `LLM`, its methods or `SamplingParams` for an error text, with its value if one is given.

    The argument stands between two marks, by which `format_arguments` finds it.
    """
    return f"\x02{name}{''.join(f'={setting!r}' for setting in value)}\x03"


def as_keyword(name: str, value: str | None) -> str:
    """Return an argument as Python code writes it."""
    return name if value is None else f"{name}={value}"


def as_option(name: str, value: str | None) -> str:
    """Return an argument as the command line writes it."""
    flag = OPTIONS.get(name) or f"--{name.replace('_', '-')}"
    shown = {None: "", "True": "", "None": " none"}
    return flag + shown.get(value, f" {value}".replace("'", ""))


_argument_format: ArgumentFormat = as_keyword


@contextmanager
def use_argument_format(argument_format: ArgumentFormat) -> Iterator[None]:
    """Format arguments in error texts with `argument_format`, in the whole process, until the context ends."""
    global _argument_format
    outer_format = _argument_format
    _argument_format = argument_format
    try:
        yield
    finally:
        _argument_format = outer_format


def format_arguments(text: str, argument_format: ArgumentFormat | None = None) -> str:
    """Return `text` with its arguments formatted by `argument_format`; None is the format of the process."""
    format_argument = argument_format or _argument_format
    return _ARGUMENT.sub(lambda match: format_argument(match[1], match[2]), text)


def escaped(text: str) -> str:
    """Return a text, which may have untrusted parts, as one line without control characters."""
    text = _shortened(text)
    if text.isprintable():
        return text
    return _shortened("".join(ascii(char)[1:-1] if category(char) in UNPRINTABLE else char for char in text))


def _shortened(text: str) -> str:
    return (
        text
        if len(text) <= MAX_MESSAGE_CHARACTERS
        else f"{text[: MAX_MESSAGE_CHARACTERS * 2 // 3]} ... {text[-MAX_MESSAGE_CHARACTERS // 3 :]}"
    )


class TriforceError(Exception):
    """A user's mistake. The text is one line: the problem and its remedy (see `escaped`)."""

    def __str__(self) -> str:
        return self.message_text()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def message_text(self, argument_format: ArgumentFormat | None = None) -> str:
        """Return the text with its arguments formatted by `argument_format`; None is the format of the process."""
        return escaped(format_arguments(super().__str__(), argument_format))

    @property
    def arguments(self) -> list[str]:
        """Names of the arguments in the text."""
        return [match[1] for match in _ARGUMENT.finditer(super().__str__())]


class ModelError(TriforceError):
    """A model that cannot be found, read or supported, or two models that do not fit together."""


class RequestError(TriforceError):
    """A prompt or a sampling parameter that cannot be served."""


class ContextLengthError(RequestError):
    """A prompt that is longer than the context of the model. Prompts are never truncated."""


class CacheError(TriforceError):
    """A saved KV cache that cannot be read, written or used with this model."""


class CacheWarning(RuntimeWarning):
    """A requested KV cache was not saved; generation continues. The command line exits with code 2."""


class RankError(TriforceError):
    """A process that shares the model has ended, or the settings or results of the processes differ."""


def require_bool(name: str, value: object) -> None:
    """Raise RequestError unless an argument is True or False. A string such as "no" would be truthy."""
    if not isinstance(value, bool):
        raise RequestError(f"{argument(name)} must be True or False, not {value!r}")


def require_integer(name: str, value: object, minimum: int, maximum: int | None = None) -> None:
    """Raise RequestError unless an argument is an integer from `minimum` to `maximum`; None is no upper bound."""
    if (
        not isinstance(value, Integral)
        or isinstance(value, bool)
        or not minimum <= int(value) <= (maximum or int(value))
    ):
        allowed = f"from {minimum} to {maximum}" if maximum else f"of at least {minimum}"
        raise RequestError(f"{argument(name)} must be an integer {allowed}, not {value!r}")


@contextmanager
def error_prefix(place: str) -> Iterator[None]:
    """Prefix the text of a TriforceError or TypeError with `place`, such as the index of a prompt."""
    try:
        yield
    except (TriforceError, TypeError) as error:
        error.args = (f"{place}: {error.args[0] if error.args else ''}",)
        raise


def nearest(typed: str, names: Iterable[str]) -> str | None:
    """Return the name of `names` that is most similar to `typed`, or None. Leading dashes are ignored."""
    from difflib import get_close_matches  # only mistakes need it

    by_word = {name.lstrip("-"): name for name in names}
    word = typed.lstrip("-")
    transposed = [name for name in by_word if sorted(name) == sorted(word)]
    words = transposed or get_close_matches(word, by_word, 1, SIMILARITY)
    return by_word[words[0]] if words else None


def suggest(typed: str, names: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" for the nearest name, or an empty string."""
    name = nearest(typed, names)
    return f" (did you mean {name}?)" if name else ""


def printable(text: object) -> str:
    """Return a name or a path for use in one line: unchanged if printable, else quoted with escapes."""
    return str(text) if str(text).isprintable() else ascii(str(text))


def unreadable(file: str | bytes | Path, error: OSError) -> ModelError:
    """Return the error of an unreadable file. It advises another download, except where permission is missing."""
    permission_missing = isinstance(error, PermissionError)
    advice = "have its owner let you read it, or name another model" if permission_missing else "download it again"
    return ModelError(f"{os.fsdecode(file)} cannot be read ({error.strerror or error}); {advice}")

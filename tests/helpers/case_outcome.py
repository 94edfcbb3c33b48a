"""Outcome of one fuzz case, and its check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BROKEN = 70
"""Exit code of a case with an uncaught exception."""
SIGNS = ("Traceback", "panicked at", "Exception ignored", "terminate called")
"""Texts that no message about an untrusted file may contain."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a case: wall-clock seconds, bytes beyond those before it, and characters of the error line."""

    seconds: float = 10.0
    bytes: int = 1 << 30
    line: int = 1000


class Outcome(NamedTuple):
    """Outcome of a case. fault: what is wrong, or "". stderr_end: the end of stderr."""

    seed: int
    code: int
    fault: str
    stderr_end: str
    seconds: float
    bytes: int


def fault(code: int, out: str, err: str, used: int, limits: Limits) -> str:
    """Return what is wrong: memory, a traceback, another exit code, escapes, more than one line for a refusal."""
    if used > limits.bytes:
        return f"it took {used >> 20} MiB"
    if sign := next((sign for sign in SIGNS if sign in out + err), ""):
        return f"it said {sign!r}"
    if code not in (0, 2):
        return f"it ended with {code}"
    if not all(character.isprintable() or character == "\n" for character in out + err):
        return "it printed what is not to be printed"
    is_one_line = err.startswith("triforce: error: ") and err.count("\n") == 1 and len(err) <= limits.line
    return "" if code == 0 or is_one_line else "its refusal is not one line"

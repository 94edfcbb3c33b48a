"""Messages on untrusted files that are refused: one line, within limits on time and memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.helpers.case_outcome import Limits
from tests.helpers.forked_case import run_case

LIMITS = Limits(seconds=10, bytes=128 << 20)


def said_of(folder: Path, open_case: Callable[[Path], int]) -> str:
    """Return the one line of a refusal."""
    outcome = run_case(0, folder, open_case, LIMITS)
    assert not outcome.fault and outcome.code == 2, outcome
    return outcome.stderr_end

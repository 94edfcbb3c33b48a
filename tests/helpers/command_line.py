"""Commands as users type them: the exit code of a command or of its argument parser."""

from __future__ import annotations

from collections.abc import Sequence

from triforce.cli import main


def exit_code(arguments: Sequence[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code

# PYTHON_ARGCOMPLETE_OK
"""The command `triforce`, and `python -m triforce`. Ctrl-C is taken care of before anything else is imported."""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # no import that Python has not made itself, as Ctrl-C would end it with a traceback
    from types import FrameType
    from typing import NoReturn


def main() -> int:
    """Run the command of this process; return its exit code. On Ctrl-C that is 130, from the first import on."""
    signal.signal(signal.SIGINT, interrupt)
    try:
        from triforce.cli import main as run

        return run()
    except KeyboardInterrupt:  # before the command has begun, or after it
        _leave(signal.SIGINT, None)
    finally:
        signal.signal(signal.SIGINT, _leave)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or end at once: a second time, and inside an import, where it may be lost or renamed."""
    if _imports(frame):
        _leave(number, frame)
    signal.signal(signal.SIGINT, _leave)
    raise KeyboardInterrupt


def _imports(frame: FrameType | None) -> bool:
    """Whether a frame runs for an import: Python's own importer is among its callers."""
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """End the process with the code that shells have for a signal."""
    try:
        os.write(2, b"\n")
    finally:  # stderr may be closed
        os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())

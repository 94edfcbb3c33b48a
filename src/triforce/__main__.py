# PYTHON_ARGCOMPLETE_OK
"""The command `triforce`, and `python -m triforce`. Ctrl-C is taken care of before anything else is imported."""

from __future__ import annotations

import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # Ctrl-C in an import ends with a traceback, so only modules that Python has loaded are imported
    from types import FrameType
    from typing import NoReturn


def main() -> int:
    """Run the command of this process; return its exit code: 130 on Ctrl-C, from the first import on."""
    began = time.perf_counter()
    signal.signal(signal.SIGINT, interrupt)
    try:
        from triforce.cli import main as run

        return run(began=began)
    except KeyboardInterrupt:  # before the command has begun, or after it
        _leave(signal.SIGINT, None)
    finally:
        signal.signal(signal.SIGINT, _leave)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt at the first Ctrl-C; end the process at the second, and at one that would be swallowed.

    An import may swallow KeyboardInterrupt, or raise another exception in its place. A finalizer prints it and goes on.
    """
    if _swallows_exceptions(frame):
        _leave(number, frame)
    signal.signal(signal.SIGINT, _leave)
    raise KeyboardInterrupt


def _swallows_exceptions(frame: FrameType | None) -> bool:
    """Whether a frame runs for an import or a finalizer: one of them is among the frame and its callers."""
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib") or frame.f_code.co_name == "__del__":
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

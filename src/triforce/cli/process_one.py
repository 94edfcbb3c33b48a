"""Process 1 of a container: it passes signals on, and reaps processes whose parents have ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def run_below_process_one(command: Callable[[], int]) -> int:
    """Run a command and return its exit code: in this process, or in a child if this process is number 1.

    The kernel drops signals that process 1 does not handle, and gives it the orphans of its container, which stay as
    zombies until it waits for them.
    """
    if os.getpid() != 1:
        return command()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)  # none may come before its handler stands
    if not (child := os.fork()):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
        return command()

    def forward(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):  # it has ended just now
            os.kill(child, number)

    for number in FORWARDED_SIGNALS:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code

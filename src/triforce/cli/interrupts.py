"""Ctrl-C in work whose passes Python cannot interrupt.

A thread receives the signal at once; the main thread learns of it only at the end of the pass.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

GRACE_SECONDS = 0.5
"""Seconds that the main thread has to end the work by itself."""


@contextmanager
def sigint_callback(callback: Callable[[], object]) -> Iterator[None]:
    """Call `callback` in a thread if the block goes on after Ctrl-C. A second Ctrl-C ends the process."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    block_ended = Event()
    earlier_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    thread = Thread(target=_listen, args=(read_fd, block_ended, callback), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier_fd)
        block_ended.set()
        os.close(write_fd)  # the thread's read then returns the end of the pipe
        thread.join()
        os.close(read_fd)


def _listen(read_fd: int, block_ended: Event, callback: Callable[[], object]) -> None:
    interrupt_count = 0
    while signal_byte := os.read(read_fd, 1):
        if signal_byte[0] == signal.SIGINT:
            interrupt_count += 1
            if interrupt_count > 1:
                os._exit(128 + signal.SIGINT)
            if not block_ended.wait(GRACE_SECONDS):
                callback()

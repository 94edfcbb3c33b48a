"""Ctrl-C in work whose passes Python cannot leave: a thread hears it, as the main one is told of it behind the pass."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

GRACE_SECONDS = 0.5
"""For the main thread to end the work by itself."""


@contextmanager
def heard(first: Callable[[], object]) -> Iterator[None]:
    """Have `first` called, in a thread, where the block goes on after Ctrl-C; a second one ends the process."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    over = Event()
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = Thread(target=_listen, args=(reading, over, first), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        over.set()
        os.close(writing)  # what the thread reads ends with it
        thread.join()
        os.close(reading)


def _listen(reading: int, over: Event, first: Callable[[], object]) -> None:
    times = 0
    while number := os.read(reading, 1):
        if number[0] == signal.SIGINT:
            times += 1
            if times > 1:
                os._exit(128 + signal.SIGINT)
            if not over.wait(GRACE_SECONDS):
                first()

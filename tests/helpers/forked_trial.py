"""A trial as `sandbox.tried` makes it, in a fork of this process: no fuzz case pays for an interpreter."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from importlib import import_module
from select import select
from typing import Any

from triforce import sandbox
from triforce.sandbox import TrialLimits, answer_in, attempt

SECONDS = 20.0
"""Wall-clock seconds of a trial. A fork that waits for a lock held by another thread is made again."""


def forked(function: str, task: Any, limits: TrialLimits) -> Any:
    """Return what a function returns in a fork within limits. Raises TrialError."""
    module, _, name = function.partition(":")
    called = getattr(import_module(module), name)
    return answer_in(said_in_fork(called, task, limits), limits)


def said_in_fork(called: Callable[[Any], Any], task: Any, limits: TrialLimits) -> str:
    """Return a fork's answer, "" if it dies or hangs."""
    return next((answer for _ in range(3) if (answer := _said(called, task, limits)) is not None), "")


def _said(called: Callable[[Any], Any], task: Any, limits: TrialLimits) -> str | None:
    """Return a fork's answer, "" if it dies, None if it hangs."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sandbox.NICENESS = 0  # a fuzz has nothing else to do
        os.write(writing, attempt(called, task, limits).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="ascii") as answers:
        stands_still = not select([answers], [], [], SECONDS)[0]
        if stands_still:
            os.kill(child, signal.SIGKILL)
        answer = answers.read()
    os.waitpid(child, 0)
    return None if stands_still else answer

"""The process that renders templates as a fork of this one: no fuzz case pays for an interpreter.

It is no child of the process under test, whose children are checked after each case.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO, Any, NoReturn

from triforce import sandbox
from triforce.checkpoint import template_worker
from triforce.checkpoint.template_process import TemplateProcess


class ForkedWorker:
    """The part of `subprocess.Popen` that `TemplateProcess` uses."""

    def __init__(self) -> None:
        down, up = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            if not os.fork():
                _become_worker(down, up)
            os._exit(0)
        os.waitpid(child, 0)
        os.close(down[0])
        os.close(up[1])
        self.stdin: IO[bytes] = open(down[1], "wb")  # noqa: SIM115  closed below
        self.stdout: IO[bytes] = open(up[0], "rb")  # noqa: SIM115

    def poll(self) -> None:
        """Return None: the answer tells whether the process has ended."""

    def kill(self) -> None:
        """Do nothing: the process ends by its timer, or at the end of its input."""

    def communicate(self) -> None:
        self.stdout.close()
        with suppress(BrokenPipeError):  # a request that it has not read
            self.stdin.close()


class ForkedTemplates(TemplateProcess):
    """Renders templates in a fork that lives from case to case."""

    def __init__(self) -> None:
        super().__init__()
        os.register_at_fork(after_in_child=super().__init__)

    def _streams(self) -> tuple[IO[bytes], IO[bytes]]:
        if not self._process:
            worker: Any = ForkedWorker()
            self._process = worker
            return worker.stdin, worker.stdout
        return super()._streams()


def _become_worker(down: tuple[int, int], up: tuple[int, int]) -> NoReturn:
    sandbox.NICENESS = 0  # a fuzz has nothing else to do
    silence = os.open(os.devnull, os.O_WRONLY)
    for place, end in ((0, down[0]), (1, up[1]), (2, silence)):
        os.dup2(end, place)
    os.closerange(3, max(*down, *up, silence) + 1)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    try:
        template_worker.main()
    finally:
        os._exit(0)

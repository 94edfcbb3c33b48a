"""ChildProcess: work on foreign input that may take too much, in a process that can be ended."""

from __future__ import annotations

from collections.abc import Sequence
from subprocess import PIPE, Popen, TimeoutExpired


class ChildProcess:
    """One run of a command, which takes bytes and gives bytes."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command, self._ended = command, False
        self._process: Popen[bytes] | None = None

    def run(self, data: bytes, seconds: float) -> bytes | None:
        """Return what the command writes for `data`; None if it fails, is ended, or is not done in so many seconds."""
        with Popen(self._command, stdin=PIPE, stdout=PIPE, stderr=PIPE) as self._process:
            if self._ended:
                self._process.kill()
            try:
                written, _ = self._process.communicate(data, seconds)
            except TimeoutExpired:
                self._process.kill()
                return None
            except BaseException:
                self._process.kill()
                raise
        return written if self._process.returncode == 0 else None

    def end(self) -> None:
        """Make `run` return at once, from another thread."""
        self._ended = True
        if self._process:
            self._process.kill()

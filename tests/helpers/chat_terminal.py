"""`triforce chat` at a pseudo-terminal. Tests wait for output and never sleep."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
# Without this the terminal would have to answer queries of the cursor position.
ENVIRONMENT = {"PYTHONPATH": PATH, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "OMP_NUM_THREADS": "1"}
READY, DONE = "\x1b[?2004h", "\x1b[?2004l"
"""Start and end marks of a prompt. Between them pastes differ from typing, and Ctrl-C is a key."""

ENTER, ALT_ENTER, CTRL_C, CTRL_D, UP = "\r", "\x1b\r", "\x03", "\x04", "\x1b[A"
STYLES = r"\x1b\[[0-9;?]*[A-Za-z]"
PATIENCE = 200


class Terminal:
    """A terminal: input to type, and the output after it."""

    def __init__(self, process: Any) -> None:
        self._process = process

    def prompt(self) -> str:
        """Wait for the next prompt; return the output before it."""
        self._process.expect_exact(READY)
        return re.sub(STYLES, "", self._process.before)

    def type(self, keys: str) -> None:
        self._process.send(keys)

    def see(self, *texts: str) -> None:
        """Wait for texts, one after the other."""
        for text in texts:
            self._process.expect_exact(text)

    def ask(self, text: str) -> str:
        """Type a line at a prompt; return the output until the next one."""
        self.type(text + ENTER)
        return self.prompt()

    def paste(self, text: str) -> None:
        self.type(f"\x1b[200~{text}\x1b[201~")

    def begin(self, text: str) -> None:
        """Type a line at a prompt, and wait for a part of the answer."""
        self.type(text + ENTER)
        self.see(DONE)
        self._process.expect(".{40}")

    def save(self, file: Path) -> None:
        """Save the conversation to a file."""
        assert f"[saved to {file}" in self.ask(f"/save {file}")

    def end(self) -> int:
        """Wait for the end of the process; return its exit code."""
        self._process.expect(pexpect.EOF)
        self._process.close()
        return int(self._process.exitstatus)


@contextmanager
def attended(command: str, *arguments: str, **environment: str) -> Iterator[Terminal]:
    """Run a command on a terminal of its own; leave no process behind."""
    line = ["-m", "triforce", command, *arguments]
    how: dict[str, Any] = {"timeout": PATIENCE, "encoding": "utf-8", "codec_errors": "replace", "dimensions": (60, 160)}
    process = pexpect.spawn(sys.executable, line, env=os.environ | ENVIRONMENT | environment, **how)
    process.delaybeforesend = None
    try:
        yield Terminal(process)
    finally:
        process.close(force=True)

"""A stream that says it is a terminal, and keeps what is written to it."""

from __future__ import annotations

import io


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True

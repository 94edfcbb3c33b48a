"""A stream that claims to be a terminal, and keeps its output."""

from __future__ import annotations

import io


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True

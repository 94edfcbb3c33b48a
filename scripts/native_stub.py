"""Writes src/triforce/backends/cpu/_native.pyi, the type stub of the native kernels, from the compiled module.

Run `python scripts/native_stub.py` after a change of the bindings (csrc/bindings/); `make native` runs it.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

FILE = Path(__file__).parents[1] / "src" / "triforce" / "backends" / "cpu" / "_native.pyi"
HEADER = "# Generated from csrc/ by scripts/native_stub.py: do not edit.\n\n"
WIDTH = 120


def stub() -> str:
    """Return the stub of the compiled module. Raises ImportError if the module or nanobind is missing."""
    from nanobind.stubgen import StubGen

    from triforce.backends.cpu import _native

    generator = StubGen(_native)
    generator.put(_native)
    return HEADER + "\n".join(map(wrapped, generator.get().strip().splitlines())) + "\n"


def wrapped(line: str) -> str:
    """Return a long line of a docstring as several lines. Other lines are returned unchanged."""
    indent = line[: len(line) - len(line.lstrip())]
    if len(line) <= WIDTH or line.endswith((":", "...")):
        return line
    return "\n".join(textwrap.wrap(line.strip(), WIDTH, initial_indent=indent, subsequent_indent=indent))


if __name__ == "__main__":
    FILE.write_text(stub(), encoding="utf-8")

"""The type stub of the native kernels is that of the bindings."""

from __future__ import annotations

import pytest

from scripts import native_stub

pytest.importorskip("nanobind", reason="it generates the stub")
pytest.importorskip("triforce.backends.cpu._native", reason="the native kernels were not built", exc_type=ImportError)


def test_stub_matches_bindings() -> None:
    assert native_stub.FILE.read_text(encoding="utf-8") == native_stub.stub(), "run scripts/native_stub.py"


def test_long_docstring_line_is_wrapped() -> None:
    signature = "    def f(self, " + "x: int, " * 20 + ") -> None: ..."
    assert native_stub.wrapped(signature) == signature
    lines = native_stub.wrapped("        " + "word " * 40).splitlines()
    assert len(lines) == 2 and all(line.startswith("        word") and len(line) <= 120 for line in lines)

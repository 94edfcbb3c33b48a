"""What runs in Triton's interpreter on a CPU: exact and slow, so shapes are small."""

from __future__ import annotations

import pytest

from triforce.kernels import extension

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture
def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As TRIFORCE_KERNELS=triton has it."""
    monkeypatch.setattr(extension, "native", None)
    monkeypatch.setattr(extension, "wanted", "triton")

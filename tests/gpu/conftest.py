"""What runs in Triton's interpreter on a CPU: exact, slow, and so small. Left out where there is no Triton."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from triforce.kernels import extension

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


@pytest.fixture
def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As TRIFORCE_KERNELS=triton has it."""
    monkeypatch.setattr(extension, "native", None)
    monkeypatch.setattr(extension, "wanted", "triton")

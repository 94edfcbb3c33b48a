"""Parameters that only `make test-all` runs: `make check` keeps one or two of each kind, to end within minutes."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Return values of one parameter, marked as slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]

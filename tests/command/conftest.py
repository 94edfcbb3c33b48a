"""The command without a model, and what is piped into it."""

from __future__ import annotations

import io
import sys
import types
from typing import Any

import pytest
from fake_llm import FakeLLM


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    module = types.ModuleType("triforce.llm")
    fake = type("LLM", (FakeLLM,), {})
    module.LLM = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triforce.llm", module)
    return fake


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Any:
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return give

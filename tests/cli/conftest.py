"""The command without a model, and what is piped into it."""

from __future__ import annotations

import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_llm import FakeLLM
from triforce.cli import engine_arguments


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    module = types.ModuleType("triforce.llm")
    fake = type("LLM", (FakeLLM,), {})
    module.LLM = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triforce.llm", module)
    monkeypatch.setattr(engine_arguments, "_try_template", lambda model, asked: None)
    return fake


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Any:
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return give


TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}bot:{% endif %}"
)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target that chats, and a tiny draft."""
    from tests.helpers.tiny_checkpoint import tiny_pair

    return tiny_pair(tmp_path_factory.mktemp("pair"), positions=32_768, chat_template=TEMPLATE)

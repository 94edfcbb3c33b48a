"""A text that takes long to be cut into tokens, and a model to be loaded, is told of on a terminal, each second."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from tests.helpers.fake_llm import FakeLLM
from tests.helpers.tty import Tty
from triforce.cli import main, progress

SLOW = 0.3


@pytest.fixture
def slow(llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that takes many of the times after which it is told of."""
    encode = llm.encode

    def encode_slowly(self: Any, prompt: str) -> list[int]:
        time.sleep(SLOW)
        return encode(self, prompt)

    monkeypatch.setattr(llm, "encode", encode_slowly)
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", SLOW / 30)


def stderr_of(monkeypatch: pytest.MonkeyPatch, *command: str) -> str:
    with monkeypatch.context() as terminal:
        terminal.setattr(sys, "stderr", tty := Tty())
        assert main([*command, "-p", "a long text"]) == 0
        return tty.getvalue()


@pytest.mark.usefixtures("slow")
def test_long_tokenization_is_told_of_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = stderr_of(monkeypatch, "generate")
    assert stderr.count("tokenizing the text: 0 s") > 1
    line = stderr.partition("\r")[2].rpartition("tokenizing")[2]
    assert line.count("\r") >= 2, "it is wiped before the next line"


@pytest.mark.usefixtures("slow")
def test_long_tokenization_is_not_told_of_where_nobody_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "tokenizing" not in stderr_of(monkeypatch, "generate", "-q")
    assert main(["generate", "-p", "a long text"]) == 0 and "tokenizing" not in capsys.readouterr().err


@pytest.mark.usefixtures("llm")
def test_short_tokenization_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tokenizing" not in stderr_of(monkeypatch, "generate")


def test_long_load_is_told_of(llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    load = llm.__init__

    def load_slowly(self: Any, *arguments: Any, **settings: Any) -> None:
        time.sleep(SLOW)
        load(self, *arguments, **settings)

    monkeypatch.setattr(llm, "__init__", load_slowly)
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", SLOW / 30)
    assert stderr_of(monkeypatch, "generate").count("\rloading: 0 s") > 1
    assert "loading:" not in stderr_of(monkeypatch, "generate", "-q")

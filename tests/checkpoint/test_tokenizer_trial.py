"""Tokenizers that kill or block the process that reads them are refused in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.broken_tokenizers import BREAKS, UNUSED, write_broken
from tests.helpers.tiny_checkpoint import save, tiny_model, tiny_tokenizer
from triforce.checkpoint import passed_trials, tokenizer_trial
from triforce.checkpoint.hub import SHIPPED
from triforce.checkpoint.model_files import HFFolder
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.cli import main
from triforce.errors import ModelError, RequestError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(tiny_model(vocab_size=300), tmp_path_factory.mktemp("model"))
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """Yield the tasks of trials. No trial has passed before."""
    tasks: list[Any] = []

    def tried(function: str, task: Any, limits: Any) -> None:
        tasks.append(task)

    monkeypatch.setattr(passed_trials, "run_trial", tried)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tasks


@pytest.mark.parametrize("name", BREAKS)
def test_broken_tokenizer_exits_2_in_one_line(model: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Libraries of other languages write to the file descriptor directly."""
    write_broken(name, model)
    arguments = ["generate", str(model), "-p", "hat", "-n", "2", "--mode", "ar", "--draft", "none", "-q"]
    code = main(arguments)
    errors = capfd.readouterr().err
    if name in UNUSED:
        assert (code, errors) == (0, "")
        return
    assert code == 2, errors
    assert errors.startswith("triforce: error: ") and errors.count("\n") == 1 and len(errors) < 1000


def test_tokenizer_that_passed_is_not_tried_again(model: Path, trials: list[Any]) -> None:
    tiny_tokenizer().save_pretrained(model)
    for _ in range(2):
        HFFolder(model).tokenizer()
    assert trials == [str(model)]
    tiny_tokenizer(pad_token="<pad>").save_pretrained(model)
    HFFolder(model).tokenizer()
    assert trials == [str(model)] * 2


def test_shipped_tokenizers_are_not_tried(trials: list[Any]) -> None:
    for folder in SHIPPED:
        HFFolder(folder).tokenizer()
    assert trials == []


def test_tokenizer_of_a_gigabyte_is_refused_unread(tmp_path: Path, trials: list[Any]) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(8 << 30)
    with pytest.raises(ModelError, match="has 8,589,934,592 bytes, more than"):
        tokenizer_trial.require_usable(tmp_path)
    assert trials == []


def test_text_that_ends_the_library_raises_request_error(model: Path, trials: list[Any]) -> None:
    """A trial has some texts, and other texts may be worse."""
    write_broken("template of a token that is not there", model)
    tokenizer = HFFolder(model).tokenizer()
    with pytest.raises(RequestError, match="tokenizer does not take this text"):
        tokenizer.encode("hat")
    write_broken("words without the unknown", model)
    with pytest.raises(RequestError, match="tokenizer does not take this text"):
        HFFolder(model).tokenizer().encode("hat")


def test_template_of_gigabytes_is_refused_unread(tmp_path: Path, trials: list[Any]) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    with (tmp_path / "chat_template.jinja").open("wb") as file:
        file.truncate(8 << 30)
    with pytest.raises(ModelError, match="has 8,589,934,592 bytes, more than"):
        Tokenizer.load(tmp_path)

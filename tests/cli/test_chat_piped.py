"""`triforce chat` without a terminal, and the files that conversations are kept in."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from triforce.cli import main
from triforce.cli.chat.conversation import Conversation, Turn, load
from triforce.errors import RequestError


def settings(pair: Path, *extra_options: str) -> list[str]:
    models = [str(pair / "target"), "--draft", str(pair / "draft"), "--dtype", "float32", "--mode", "ar"]
    return ["chat", *models, "--temperature", "0", "--ignore-eos", *extra_options]


def test_piped_line_is_one_question(pair: Path, stdin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Slashes too: scripts ask what they like."""
    stdin(b"the cat\n\n/exit\n")
    assert main(settings(pair, "--max-tokens", "4")) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") >= 2 and err.count("[cut at --max-tokens 4]") == err.count("tokens/s") == 2
    stdin(b"the cat\n/exit\n")
    assert main(settings(pair, "--max-tokens", "4", "--quiet")) == 0
    assert capsys.readouterr() == (out, "[cut at --max-tokens 4]\n" * 2)
    assert "triforce.cli.chat.terminal" not in sys.modules  # nor what it imports


def test_piped_question_too_long_is_skipped(pair: Path, stdin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stdin(b"the cat\n" + b"q" * 200 + b"\nthe hat\n")
    assert main(settings(pair, "--context", "128", "--max-tokens", "4")) == 2
    err = capsys.readouterr().err
    assert err.count("tokens/s") == 2 and err.count("triforce: error: this takes ") == 1
    assert "the context is 128; nothing was asked" in err


def test_answer_filling_context_is_marked(pair: Path, stdin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stdin(b"the cat\n")
    assert main(settings(pair, "--context", "128", "--max-tokens", "1000")) == 0
    assert "[cut: the context of 128 tokens is full]" in capsys.readouterr().err


def test_document_without_room_is_reported(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "book").write_text("q" * 300)
    assert main(settings(pair, "--context", "128", "--file", str(tmp_path / "book"))) == 2
    assert "the document and the system message are" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat"], "cannot chat, as it has no chat template; give a MODEL"),
        (["chat", "model", "--n", "2"], "--n is not an option of triforce chat"),
        (["chat", "model", "--logprobs", "2"], "--logprobs is not an option of triforce chat"),
    ],
)
def test_chat_bad_options_fail_before_loading(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    err = capsys.readouterr().err
    assert end.value.code == 2 and message in err and err.count("\n") == 1


def test_document_precedes_first_question() -> None:
    conversation = Conversation("be brief", "a book", [Turn("who?", "me"), Turn("why?", "so")])
    assert conversation.messages("when?", after=1) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a book\n\nwhy?"},
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": "when?"},
    ]


def test_saved_conversation_is_restored(tmp_path: Path) -> None:
    conversation = Conversation("be\nbrief", "naïve 🙂", [Turn("who?", "me"), Turn("", "")])
    conversation.save(tmp_path / "file", "model")
    conversation.turns.pop()
    conversation.save(tmp_path / "file", "model")
    assert load(tmp_path / "file") == conversation
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    with pytest.raises(RequestError, match="cannot be written"):
        conversation.save(tmp_path / "no" / "file", "model")


@pytest.mark.parametrize(
    "changes",
    [
        {"triforce_chat": 2},
        {"system": 3},
        {"document": None},
        {"messages": "hello"},
        {"messages": [{"role": "user", "content": "?"}]},
        {"messages": [{"role": "assistant", "content": "."}, {"role": "user", "content": "?"}]},
    ],
    ids=str,
)
def test_conversation_file_invalid_is_refused_and_kept(changes: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "file"
    Conversation().save(file, "model")
    good = json.loads(file.read_text())
    file.write_text(foreign := json.dumps(good | changes))
    with pytest.raises(RequestError, match="holds no conversation of triforce; give a file that /save wrote"):
        load(file)
    with pytest.raises(RequestError, match="name another file"):
        Conversation().save(file, "model")
    assert file.read_text() == foreign

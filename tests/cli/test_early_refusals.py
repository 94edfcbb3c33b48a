"""Requests that are refused before a model's weights are read, which takes seconds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hostile_templates import HOSTILE
from triforce.cli import main


@pytest.mark.parametrize("template", [HOSTILE["loops"], "{{ nothing.of.that }}", "{% if"])
@pytest.mark.parametrize("command", [["chat"], ["generate", "--chat", "-p", "a question", "-m"]])
def test_unusable_chat_template_is_refused_before_weights_are_read(
    template: str, command: list[str], pair: Path, tmp_path: Path, stdin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(pair / "target", tmp_path / "model"))
    for file in model.glob("chat_template*"):
        file.unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    (model / "model.safetensors").write_bytes(b"no weights")
    stdin(b"a question\n")
    assert main([*command, str(model), "--draft", "none"]) == 2
    err = capsys.readouterr().err
    assert "the model's chat template" in err and err.count("\n") == 1


@pytest.mark.parametrize("text", ["", " \n\t\n"])
def test_document_without_text_is_refused(
    text: str, tmp_path: Path, stdin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text(text)
    stdin(b"")
    assert main(["chat", "no-such-model", "--file", str(tmp_path / "empty.txt")]) == 2
    assert "empty.txt is empty; give a document with text in it" in capsys.readouterr().err


def test_empty_prompt_file_is_what_is_blamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert main(["generate", "smollm2", "--prompt-file", str(tmp_path / "empty.txt")]) == 2
    err = capsys.readouterr().err
    assert "empty.txt is empty; give at least one character" in err and "MODEL" not in err

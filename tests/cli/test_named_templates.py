"""Chat templates that a user names, by a file or by the name of a common form."""

from __future__ import annotations

from pathlib import Path

import pytest

from triforce.checkpoint.chat_template import render
from triforce.checkpoint.named_templates import MAX_BYTES, TEMPLATE_NAMES, read_chat_template
from triforce.cli import main
from triforce.errors import ModelError
from triforce.llm import LLM

TURNS = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
TEXTS = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
    "gemma": "<s><start_of_turn>user\nS\n\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n<start_of_turn>user\nc"
    "<end_of_turn>\n<start_of_turn>model\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "a<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nc"
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] S\n\na [/INST] b</s>[INST] c [/INST]",
    "plain": "system: S\nuser: a\nassistant: b\nuser: c\nassistant:",
}


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_named_template_writes_the_form_of_its_family(name: str) -> None:
    variables = {"messages": TURNS, "bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    assert render(read_chat_template(name), variables) == TEXTS[name]


def test_template_of_a_file_replaces_the_models_own(pair: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.role }}>{{ m.content }}{% endfor %}")
    llm = LLM(pair / "target", None, chat_template=file)
    assert llm.tokenizer
    assert llm.tokenizer.decode(llm.tokenizer.chat(TURNS[1:2])) == "user>a"
    assert llm.fingerprint != LLM(pair / "target", None).fingerprint


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{% for m in messages %}", "endfor"),
        (b"{{ raise_exception('no') }}", "no"),
        (b"\xff\xfe", "not UTF-8"),
        (b" " * (MAX_BYTES + 1), "larger than"),
        (None, "give a file, or one of chatml"),
    ],
)
def test_template_that_cannot_be_used_is_refused_at_loading(
    pair: Path, tmp_path: Path, text: bytes | None, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.jinja"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(ModelError, match=reason):
        LLM(pair / "target", None, chat_template=file)
    assert main(["chat", str(pair / "target"), "--draft", "none", "--chat-template", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("triforce: error: --chat-template ") and reason in line

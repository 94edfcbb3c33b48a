"""Tokenizers are those of transformers: ids, special tokens and vocabularies, for every set of files in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_tokenizer import TEMPLATE, llama2_tokenizer
from tests.helpers.tiny_checkpoint import edit
from tests.helpers.tokenizer_folders import MADE, both, byte_level, set_class, with_files_of_old
from triforce.checkpoint.tokenizer import Tokenizer, configured_eos_ids
from triforce.checkpoint.tokenizer_files import read_tokenizer
from triforce.errors import ModelError

TEXTS = [
    "the cat sat on the mat",
    " naïve  café — 東京 🙂\n\n\tx ",
    "",
    "<s>the hat</s><s> the cat",
    "a <s> b <s>",
    "<|call|>a<|call|> b<|late|>the <|im_end|>\n",
    "a <tool> b<pad>c",
]
PLAIN = [text for text in TEXTS if not text.startswith((" ", "<")) and "<s>" not in text]


@pytest.mark.parametrize("tokenizer_kind", MADE)
def test_tokenizer_folder_equals_transformers(tmp_path: Path, tokenizer_kind: str) -> None:
    MADE[tokenizer_kind](tmp_path)
    ours, theirs = both(tmp_path, "qwen2" if tokenizer_kind.startswith("Qwen") else "llama")
    assert read_tokenizer(tmp_path).core.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False), text
    assert ours.eos_ids == {theirs.eos_token_id} - {None}
    named = {name: token for name, token in theirs.special_tokens_map.items() if token is not None}
    assert dict(read_tokenizer(tmp_path).special) == named
    special = {i for i, token in theirs.backend_tokenizer.get_added_tokens_decoder().items() if token.special}
    assert ours.special_ids == special


def test_llama2_tokenizer_json_is_read_as_is(tmp_path: Path) -> None:
    """transformers 5 builds another tokenizer: without SentencePiece's space mark before a space and behind a mark."""
    hf = llama2_tokenizer()
    hf.save_pretrained(tmp_path)
    set_class(tmp_path, "LlamaTokenizer")
    ours, theirs = both(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == hf.encode(text)
        assert text not in PLAIN or ours.encode(text) == theirs.encode(text)


def test_oracle_missing_token_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_files_of_old(tmp_path)
    monkeypatch.setattr("triforce.checkpoint.tokenizer_files._tokens_to_add", lambda *_: ())
    ours, theirs = both(tmp_path)
    assert read_tokenizer(tmp_path).core.get_vocab() != theirs.get_vocab() and ours.encode(TEXTS[5]) != theirs.encode(
        TEXTS[5]
    )


def test_folder_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    byte_level(tmp_path, chat_template=TEMPLATE)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"] | {"<|endoftext|>": 300}))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (tmp_path / "tokenizer.json").unlink()
    set_class(tmp_path, "GPT2Tokenizer")
    ours, theirs = both(tmp_path)
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
    assert ours.eos_ids == {theirs.eos_token_id} and ours.template == TEMPLATE


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": 5},
        {"eos_token": {"text": "</s>"}},
        {"eos_token": ["</s>"]},
        {"eos_token": {"content": "</s>", "lstrip": "yes"}},
        {"added_tokens_decoder": {"1": {"content": "x", "lstrip": []}}},
        {"extra_special_tokens": [5]},
        {"added_tokens_decoder": {"one": {"content": "x"}}},
        {"added_tokens_decoder": {"1": {"contents": "x"}}},
        {"added_tokens_decoder": [1]},
        {"chat_template": 5},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": {"default": 1}},
    ],
)
def test_tokenizer_wrong_config_raises_one_line(tmp_path: Path, config: dict[str, Any]) -> None:
    byte_level(tmp_path)
    edit(tmp_path / "tokenizer_config.json", **config)
    with pytest.raises(ModelError, match=r"tokenizer_config.json"):
        Tokenizer.load(tmp_path)


def test_template_must_be_text(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template.jinja cannot be read as text"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("value", ["</s>", 1.5, True, {}, [1, None], [[1]]])
def test_eos_must_be_ids(tmp_path: Path, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id = .*token ids"):
        configured_eos_ids(tmp_path)

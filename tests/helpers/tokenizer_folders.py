"""Folders of tokenizer files as publishers and earlier versions of transformers write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from tokenizers import processors

from tests.helpers.tiny_checkpoint import edit, tiny_tokenizer
from triforce.checkpoint.tokenizer import Tokenizer


def byte_level(folder: Path, **options: Any) -> None:
    tiny_tokenizer(**options).save_pretrained(folder)


def with_bos(folder: Path) -> None:
    hf = tiny_tokenizer()
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    hf.save_pretrained(folder)


def asked_for_bos(folder: Path) -> None:
    """The config asks for begin and end tokens, but tokenizer.json decides."""
    byte_level(folder)
    edit(folder / "tokenizer_config.json", add_bos_token=True, add_eos_token=True)


def with_tokens_in_the_config(folder: Path) -> None:
    byte_level(folder)
    late_token = {"content": "<|late|>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    call = late_token | {"content": "<|call|>", "special": True, "lstrip": False}
    decoder = {"300": call, "0": call | {"content": "<s>"}, "299": late_token}
    edit(folder / "tokenizer_config.json", added_tokens_decoder=decoder, pad_token="<pad>", image_token="<|im_end|>")


def found_otherwise(folder: Path) -> None:
    """The config decides how tokens are matched in a text, and which are special."""
    byte_level(folder)
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    decoder = {
        "0": plain | {"content": "<s>", "rstrip": True, "lstrip": True, "special": True},
        "300": plain | {"content": "<|call|>", "special": False},
        "301": plain | {"content": "<pad>"},
    }
    edit(
        folder / "tokenizer_config.json",
        added_tokens_decoder=decoder,
        extra_special_tokens=["<|call|>"],
        pad_token="<pad>",
    )


def with_files_of_old(folder: Path) -> None:
    byte_level(folder)
    end = {"content": "<|im_end|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    special = {"eos_token": end, "additional_special_tokens": ["<|call|>"], "pad_token": "<pad>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": 300, "<|im_end|>": 301}))
    edit(folder / "tokenizer_config.json", eos_token=...)


def with_named_extras(folder: Path) -> None:
    byte_level(folder)
    edit(folder / "tokenizer_config.json", extra_special_tokens={"tool_token": "<tool>"}, unk_token=None)


def with_extras(folder: Path) -> None:
    byte_level(folder)
    edit(folder / "tokenizer_config.json", extra_special_tokens=["<tool>", "<|call|>"])


def that_splits(folder: Path) -> None:
    byte_level(folder)
    edit(folder / "tokenizer_config.json", split_special_tokens=True)


def set_class(folder: Path, name: str) -> None:
    edit(folder / "tokenizer_config.json", tokenizer_class=name)


def called(name: str, make: Callable[[Path], None] = byte_level) -> Callable[[Path], None]:
    """Return a writer of the same files with another tokenizer class."""

    def make_and_call(folder: Path) -> None:
        make(folder)
        set_class(folder, name)

    return make_and_call


def without_config(folder: Path) -> None:
    byte_level(folder)
    (folder / "tokenizer_config.json").unlink()


def of_class(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        vocab = tiny_tokenizer().get_vocab()
        model = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
        if name == "LlamaTokenizer":
            pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "ab", "東"]
            vocab = {p: i for i, p in enumerate(pieces)}
            model = {"merges": [("▁", "a"), ("a", "b")]}
        else:
            vocab["<|endoftext|>"] = len(vocab)
        merges = [tuple(pair) for pair in model["merges"]]
        getattr(transformers, name)(vocab=vocab, merges=merges).save_pretrained(folder)

    return make


MADE: dict[str, Callable[[Path], None]] = {
    "byte level": byte_level,
    "a first token": with_bos,
    "a first token that is asked for": asked_for_bos,
    "tokens in the config": with_tokens_in_the_config,
    "tokens found otherwise": found_otherwise,
    "files of old": with_files_of_old,
    "named extras": with_named_extras,
    "extras": with_extras,
    "special tokens as text": that_splits,
    "no config": without_config,
    "TokenizersBackend": called("TokenizersBackend"),
    "PreTrainedTokenizerFast": called("PreTrainedTokenizerFast"),
    "a first token, LlamaTokenizerFast": called("LlamaTokenizerFast", with_bos),
    "LlamaTokenizer": of_class("LlamaTokenizer"),
    "Qwen2Tokenizer": of_class("Qwen2Tokenizer"),
    "GPT2Tokenizer": of_class("GPT2Tokenizer"),
}


def both(folder: Path, family: str = "llama") -> tuple[Tokenizer, Any]:
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    theirs.backend_tokenizer.no_truncation()
    return Tokenizer.load(folder), theirs

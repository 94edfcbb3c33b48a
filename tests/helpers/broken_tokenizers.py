"""Tokenizer files that crash, stall or confuse the library that reads them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tests.helpers.tiny_checkpoint import tiny_tokenizer

Json = dict[str, Any]
END = {"id": "</s>", "type_id": 0}


def broken(name: str) -> Json:
    """Return the contents of a tokenizer.json."""
    contents: Json = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    BREAKS[name](contents)
    return contents


def write_broken(name: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(broken(name)))


def _short_merges(contents: Json) -> None:
    contents["model"] |= {"continuing_subword_prefix": "#" * 40}


def _charsmap(contents: Json) -> None:
    damaged = (1 << 20).to_bytes(4, "little") + bytes(range(64))
    contents["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(damaged).decode()}


def _charsmap_of_jumps(contents: Json) -> None:
    """Return a charsmap whose units point beyond its end."""
    damaged = (64).to_bytes(4, "little") + b"\xff\xff\xff\x7f" * 16 + b"x"
    contents["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(damaged).decode()}


def _padding(contents: Json) -> None:
    contents["padding"] = {
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<s>",
    }  # fmt: skip


def _truncation(contents: Json) -> None:
    contents["truncation"] = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}


def _template(contents: Json) -> None:
    contents["post_processor"] = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": END}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    }  # fmt: skip


def _without_unknown(model: Any) -> Callable[[Json], None]:
    """Replace the model by one without tokens for most texts."""

    def replace(contents: Json) -> None:
        core = Tokenizer(model())
        core.pre_tokenizer, core.normalizer = pre_tokenizers.Whitespace(), normalizers.NFC()
        contents |= json.loads(core.to_str())

    return replace


def _many_added(contents: Json) -> None:
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    contents["added_tokens"] = [
        {"id": 1000 + i, "content": f"{i:x}" + "ab" * 500 + f"{i:x}", **token} for i in range(20_000)
    ]


BREAKS: dict[str, Callable[[Json], None]] = {
    "merges shorter than the prefix": _short_merges,
    "damaged charsmap": _charsmap,
    "charsmap of jumps": _charsmap_of_jumps,
    "padding of length 0": _padding,
    "stride beyond the length": _truncation,
    "template of a token that is not there": _template,
    "words without the unknown": _without_unknown(lambda: models.WordLevel({"a": 0, "b": 1}, unk_token="[UNK]")),
    "pieces without the unknown": _without_unknown(lambda: models.WordPiece({"a": 0, "##b": 1}, unk_token="[UNK]")),
    "unigrams without the unknown": _without_unknown(lambda: models.Unigram([("a", -1.0), ("b", -2.0)])),
    "no tokens": lambda contents: contents.update(added_tokens=[], model={"type": "BPE", "vocab": {}, "merges": []}),
    "many added tokens": _many_added,
    "no model": lambda contents: contents.pop("model"),
    "regex that goes back without end": lambda contents: contents.update(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    ),
}
UNUSED = ("padding of length 0", "stride beyond the length")
"""Broken settings that are switched off: such files can be used."""

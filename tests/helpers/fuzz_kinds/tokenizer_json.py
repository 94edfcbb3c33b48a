"""Cases of tokenizer.json: tokenizers of several kinds, spoiled anywhere or in ways unexpected by the library."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.helpers.broken_tokenizers import BREAKS
from tests.helpers.fuzz_kinds.config_json import ASKED, copied, generated
from tests.helpers.fuzz_kinds.config_json import whole as whole_model
from tests.helpers.hostile_values import as_json, hostile_value, spoiled
from tests.helpers.trial_server import TrialServer
from triforce.checkpoint import passed_trials, tokenizer_trial

FIELDS = [
    "vocab", "merges", "unk_token", "unk_id", "dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
    "byte_fallback", "ignore_merges", "max_input_chars_per_word", "type", "added_tokens", "content", "special", "id",
    "normalizer", "pre_tokenizer", "post_processor", "decoder", "model", "single", "pair", "special_tokens", "pattern",
    "precompiled_charsmap", "replacement", "prepend_scheme", "padding", "truncation", "behavior", "sep", "cls",
]  # fmt: skip


@cache
def whole() -> list[str]:
    """Return valid contents: BPE over bytes and over pieces, word pieces, unigrams and words."""
    pieces = ["[UNK]", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "ab", "東"]
    ids = {piece: i for i, piece in enumerate(pieces)}
    bpe = Tokenizer(models.BPE(ids, [("▁", "a"), ("a", "b")], byte_fallback=True, unk_token="[UNK]", fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "<s>": 1, "</s>": 2, "a": 3, "##b": 4}, unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words.post_processor, words.decoder = processors.BertProcessing(("</s>", 2), ("<s>", 1)), decoders.WordPiece()
    unigram = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, byte_fallback=True))
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    plain = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)])
    for core in (bpe, words, unigram, plain):
        core.add_special_tokens(["<s>", "</s>"])
    bpe.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    files = [core.to_str() for core in (bpe, words, unigram, plain)]
    return [(whole_model("llama-biases") / "tokenizer.json").read_text(), *files]


def write_whole(kind: int, folder: Path) -> None:
    (copied("llama-biases", folder) / "tokenizer.json").write_text(whole()[kind])


WHOLES = [partial(write_whole, kind) for kind in range(5)]


def make_case(random: Random, folder: Path) -> None:
    copied("llama-biases", folder)
    contents: dict[str, Any] = json.loads(random.choice(whole()))
    if random.random() < 0.2:
        BREAKS[random.choice(list(BREAKS))](contents)
    if random.random() < 0.4:
        contents = spoiled(random, contents, FIELDS)
    for _ in range(random.choice([0, 1, 1, 2, 5])):
        spoil_part(random, contents)
    text = as_json(contents)
    if random.random() < 0.05:
        text = text[: random.randrange(len(text))]
    (folder / "tokenizer.json").write_text(text)
    if random.random() < 0.15:
        file = folder / "tokenizer_config.json"
        file.write_text(as_json(spoiled(random, json.loads(file.read_text()), ["added_tokens_decoder", "eos_token"])))


def spoil_part(random: Random, contents: dict[str, Any]) -> None:
    """Replace one value at any depth, in lists too, by another value of the file or by a foreign one."""
    place: Any = contents
    while inner := [value for value in children(place) if isinstance(value, dict | list) and value]:
        if place is not contents and random.random() < 0.3:
            break
        place = random.choice(inner)
    if not place:
        return
    keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
    key = random.choice(keys)
    match random.randrange(5):
        case 0:
            del place[key]
        case 1:
            place[key] = place[random.choice(keys)] if len(keys) > 1 else hostile_value(random)
        case 2 if isinstance(place[key], str):
            place[key] = random.choice([place[key][:-1], place[key] * 2, f"{place[key]} ", f"[{place[key]}", ""])
        case 3 if isinstance(place, list):
            place.append(place[key])
        case _:
            place[key] = hostile_value(random)


def children(place: Any) -> list[Any]:
    return list(place.values()) if isinstance(place, dict) else list(place)


@cache
def server() -> TrialServer:
    return TrialServer(tokenizer_trial.__name__)


def open_case(folder: Path) -> int:
    """Generate a text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passed_trials, "run_trial", server().tried)
        return generated([str(folder), "--draft", "none", "--mode", "ar", *ASKED])

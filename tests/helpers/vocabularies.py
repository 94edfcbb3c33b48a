"""Comparison of a GGUF file's tokenizer with llama.cpp's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unicodedata import normalize

from tokenizers.normalizers import NFC

from tests.helpers import llama_oracle
from triforce.checkpoint.gguf.file import GGUFFile
from triforce.checkpoint.gguf.tokenizer import read_gguf_tokenizer
from triforce.checkpoint.gguf.vocabulary import STRUCK
from triforce.checkpoint.tokenizer import Tokenizer


@dataclass(frozen=True)
class Compared:
    """The compared values, and the differences."""

    tokens: int
    """Ids of all texts."""
    texts: list[str]
    """Texts whose ids differ."""
    ends: list[str]
    """Tokens that begin and end texts, as far as they differ."""
    pieces: list[str]
    """Differing bytes of tokens. llama.cpp hides tokens that stand for holes in code."""


def compare(file: Path, texts: Sequence[str]) -> Compared:
    """Compare ids of texts, and a tokenizer's settings. Raises ModelError for a refused tokenizer.

    llama.cpp gets texts composed where the model's own tokenizer composes them, which llama.cpp's does not.
    Texts with `</s>` are left out where that is a normal token: llama.cpp ends texts at it, and we do not.
    """
    ours = read_gguf_tokenizer(GGUFFile(file).metadata, file.name)
    core = ours.files.core
    tokenizer = Tokenizer(ours.files, ours.eos_ids)
    struck = core.token_to_id(STRUCK)
    if struck is not None and struck not in core.get_added_tokens_decoder():
        texts = [text for text in texts if STRUCK not in text]
    composes = isinstance(core.normalizer, NFC)
    theirs = llama_oracle.tokenized(file, [normalize("NFC", text) if composes else text for text in texts])
    theirs["eos_ids"] = [token for token in theirs["eos_ids"] if token != struck or token in ours.eos_ids]
    pieces = [b"" if i in tokenizer.special_ids else piece for i, piece in enumerate(tokenizer.all_bytes())]
    our_facts = {"adds_bos": ours.adds_bos, "adds_eos": ours.adds_eos, "eos_ids": sorted(ours.eos_ids)}
    ends = [f"{name}: {theirs[name]}, ours {mine}" for name, mine in our_facts.items() if mine != theirs[name]]
    piece_pairs = zip(pieces, map(bytes.fromhex, theirs["pieces"]), strict=False)  # theirs has unused tokens at the end
    strange = [f"token {i} is {piece!r}, ours {mine!r}" for i, (mine, piece) in enumerate(piece_pairs) if mine != piece]
    ids = [encoded.ids for encoded in core.encode_batch(texts, add_special_tokens=False)]
    differing = [text for text, mine, their_ids in zip(texts, ids, theirs["ids"], strict=True) if mine != their_ids]
    return Compared(sum(map(len, theirs["ids"])), differing, ends, strange)

"""The tokenizer of a GGUF file, built from its metadata. Token ids are those of llama.cpp, of composed texts for Qwen.

Two kinds are read: byte-level BPE ("gpt2") and BPE by scores, as SentencePiece makes it ("llama").
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Core
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from triforce.checkpoint.gguf_pretokenizers import pre_tokenizer, pre_tokenizer_kind
from triforce.checkpoint.gguf_scores import merges_by_score
from triforce.checkpoint.gguf_vocabulary import (
    CONTROL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    GGUFVocabulary,
    end_ids,
    read_vocabulary,
)
from triforce.checkpoint.tokenizer_files import TokenizerFiles
from triforce.errors import ModelError

TEMPLATE = "tokenizer.chat_template"
NAMES = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
         "pad_token": "padding_token_id", "sep_token": "seperator_token_id", "mask_token": "mask_token_id"}  # fmt: skip
"""Keys of special tokens, by the names that chat templates have for them. The misspelt one is the format's."""
DEFAULTS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}
"""Special tokens of SentencePiece models whose metadata do not name them."""
NEEDED = frozenset("ĊĠ").union(map(chr, range(0x21, 0x7F)))
"""Bytes of plain English, as byte-level BPE writes them. Some vocabularies lack bytes that their corpus had not."""
MOST_ADDED = 1 << 21
"""Characters of all tokens that are found before a text is cut, which take long and 100 bytes each to prepare for."""
_BLANK = "▁"


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """A tokenizer out of metadata: what its files would hold, and how a text begins and ends."""

    files: TokenizerFiles
    eos_ids: frozenset[int]
    adds_bos: bool
    adds_eos: bool


def read_gguf_tokenizer(metadata: Mapping[str, Any], where: str) -> GGUFTokenizer:
    """The tokenizer in the metadata of the file `where`. Raises ModelError naming the key that is wrong."""
    vocabulary, kind = read_vocabulary(metadata, where), metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{where}: tokenizer.ggml.model = {str(kind)[:40]!r} is not supported (supported: gpt2, llama)"
        )
    try:
        with _without_garbage_collection():
            core, bos = _byte_level(vocabulary) if kind == "gpt2" else _by_scores(vocabulary)
        core.add_tokens(_added(vocabulary))
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing more special
        vocabulary.fail(f"its tokenizer cannot be built ({' '.join(str(error).split())[:200]})")
    special = _special(vocabulary, DEFAULTS if kind == "llama" else {})
    adds = {"bos": vocabulary.flag("add_bos_token", bos), "eos": vocabulary.flag("add_eos_token", False)}
    _frame(core, vocabulary, [name for name in adds if adds[name]], special)
    end = {vocabulary.ids[special["eos_token"]]} if "eos_token" in special else frozenset()
    files = TokenizerFiles(core, special, _templates(vocabulary))
    return GGUFTokenizer(files, end_ids(vocabulary) | end, adds["bos"], adds["eos"])


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Merges are hundreds of thousands of tuples: to look for cycles among them takes a tenth of their time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _byte_level(vocabulary: GGUFVocabulary) -> tuple[Core, bool]:
    """Return BPE over bytes, and whether its texts begin with a first token unless the file says otherwise."""
    kind = pre_tokenizer_kind(vocabulary.metadata.get("tokenizer.ggml.pre"), vocabulary.where)
    # Rows that pad the embedding have names that no text holds.
    ids = {text: i for (text, i), use in zip(vocabulary.ids.items(), vocabulary.kinds, strict=True) if use != UNUSED}
    missing = set(ByteLevel.alphabet()) - ids.keys()
    if lost := sorted(missing & NEEDED):
        vocabulary.fail(f"tokenizer.ggml.tokens has no token for the byte that is written {lost[0]!r}")
    # Of two that are equal the first counts, and in the library the last would.
    merges: Any = [tuple(merge.split(" ", 1)) for merge in dict.fromkeys(vocabulary.texts("merges"))]
    core = Core(BPE(ids, merges, ignore_merges=kind.whole))
    core.pre_tokenizer, core.decoder = pre_tokenizer(kind, missing), decoders.ByteLevel()
    if kind.composes:
        core.normalizer = normalizers.NFC()
    return core, kind.bos


def _by_scores(vocabulary: GGUFVocabulary) -> tuple[Core, bool]:
    """The same of BPE by scores: characters without a token are written as their bytes."""
    ids = vocabulary.ids
    if missing := [text for text in (f"<0x{byte:02X}>" for byte in range(256)) if text not in ids]:
        vocabulary.fail(f"tokenizer.ggml.tokens lacks the byte token {missing[0]}")
    core = Core(BPE(dict(ids), merges_by_score(vocabulary), byte_fallback=True))
    begins = vocabulary.flag("add_space_prefix", True)
    prefix = [normalizers.Prepend(_BLANK)] if begins else []
    core.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _BLANK)])
    strip = [decoders.Strip(" ", 1, 0)] if begins else []
    core.decoder = decoders.Sequence([decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return core, True


def _added(vocabulary: GGUFVocabulary) -> list[AddedToken]:
    """Return tokens that are found in a text before it is cut; those that are special only where these are parsed."""
    kinds = zip(vocabulary.ids, vocabulary.kinds, strict=True)
    found = [(text, kind) for text, kind in kinds if kind in (CONTROL, UNKNOWN, USER_DEFINED)]
    if (length := sum(len(text) for text, _ in found)) > MOST_ADDED:
        vocabulary.fail(f"control and user-defined tokens have {length:,} characters, more than {MOST_ADDED:,}")
    return [AddedToken(text, normalized=False, special=kind != USER_DEFINED) for text, kind in found]


def _special(vocabulary: GGUFVocabulary, defaults: Mapping[str, int]) -> dict[str, str]:
    texts = list(vocabulary.ids)
    found = {name: vocabulary.named(key, defaults.get(name)) for name, key in NAMES.items()}
    return {name: texts[i] for name, i in found.items() if i is not None}


def _frame(core: Core, vocabulary: GGUFVocabulary, adds: list[str], special: Mapping[str, str]) -> None:
    """Let texts begin and end with the tokens that the file asks for."""
    for name in adds:
        if f"{name}_token" not in special:
            vocabulary.fail(f"tokenizer.ggml.add_{name}_token is true, but tokenizer.ggml.{name}_token_id is missing")
    if adds:
        texts = {name: special[f"{name}_token"] for name in adds}
        tokens = [{"id": name, "ids": [vocabulary.ids[text]], "tokens": [text]} for name, text in texts.items()]
        single = [*(["bos"] if "bos" in adds else []), "$A", *(["eos"] if "eos" in adds else [])]
        core.post_processor = TemplateProcessing(single=single, special_tokens=tokens)


def _templates(vocabulary: GGUFVocabulary) -> dict[str, str]:
    """Return chat templates by name; the one without a name is `default`."""
    metadata, found = vocabulary.metadata, {}
    for key, template in metadata.items():
        name = "default" if key == TEMPLATE else key.removeprefix(f"{TEMPLATE}.")
        if key != TEMPLATE and name == key:
            continue
        if not isinstance(template, str):
            vocabulary.fail(f"{key} is no text")
        found[name] = template
    return found

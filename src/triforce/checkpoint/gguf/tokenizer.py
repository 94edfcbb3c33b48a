"""The tokenizer of a GGUF file, built from its metadata.

Token ids are those of llama.cpp; with Qwen's tokenizers they are for texts in NFC.

Two kinds are supported: byte-level BPE ("gpt2") and SentencePiece's BPE by scores ("llama").
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers
from tokenizers import Tokenizer as Core
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split
from tokenizers.processors import TemplateProcessing

from triforce.checkpoint.gguf.merges import merges_by_score
from triforce.checkpoint.gguf.vocabulary import (
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

_SUFFIX = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER = r"(?:(?=\p{L})[^a-z])"
_LOWER = r"(?:(?=\p{L})[^A-Z])"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_CHINESE = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"
_EASTERN = r"(?:(?!\s)[\x{0800}-\x{9FA5}\x{AC00}-\x{D7FF}])+"
_ASCII_MARK = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACE}"
_QWEN2 = rf"{_SUFFIX}|{_WORD}|\p{{N}}|{_MARKS}|{_SPACE}"
_QWEN35 = rf"{_SUFFIX}|{_FIRST}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
_TEKKEN = rf"{_FIRST}{_UPPER}*{_LOWER}+|{_FIRST}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
_GPT4O = (
    rf"{_FIRST}{_UPPER}*{_LOWER}+(?:{_SUFFIX})?|{_FIRST}{_UPPER}+{_LOWER}*(?:{_SUFFIX})?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
)
_DEEPSEEK3 = (
    rf"{_ASCII_MARK}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}"
)
_MINICPM5 = rf"{_SUFFIX}|{_WORD}|\p{{N}}+|{_MARKS}|{_SPACE}"
_VIKING = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C})]+"
_SEED = rf"{_SUFFIX}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}"


@dataclass(frozen=True, slots=True)
class PreTokenizerKind:
    """Pre-tokenization regexes, and other properties that come with a pre-tokenizer's name."""

    expressions: tuple[str, ...]
    ignores_merges: bool = False
    """Whether a piece that is a token skips merges."""
    bos: bool = False
    """Whether texts begin with BOS if the file does not say."""
    composes: bool = False
    """Whether a text is NFC-normalised before the split, as in the family's own tokenizer.

    GGUF files do not state it, and llama.cpp does not normalise.
    """


KINDS: dict[PreTokenizerKind, tuple[str, ...]] = {
    PreTokenizerKind((_GPT2,)): (
        "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "a.x-4.0",
        "mellum", "modern-bert", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de",
    ),
    PreTokenizerKind((r"\p{N}", _GPT2)): (
        "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2",
    ),
    PreTokenizerKind((_LLAMA3,), ignores_merges=True, bos=True): (
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
    ),
    PreTokenizerKind((_LLAMA3,)): ("dbrx", "smaug-bpe", "chatglm-bpe"),
    PreTokenizerKind((_LLAMA3,), ignores_merges=True): ("glm4", "glm5"),
    PreTokenizerKind((_QWEN2,), composes=True): ("qwen2",),
    PreTokenizerKind((_QWEN2,)): (
        "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "kormo", "f2llmv2", "solar-open", "grok-2",
    ),
    PreTokenizerKind((_QWEN35,), composes=True): ("qwen35",),
    PreTokenizerKind((_TEKKEN,), ignores_merges=True, bos=True): ("tekken",),
    PreTokenizerKind((_GPT4O,)): ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
    PreTokenizerKind((r"\p{N}{1,3}", _CHINESE, _DEEPSEEK3)): ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
    PreTokenizerKind((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EASTERN, r"\p{N}")): ("deepseek-coder",),
    PreTokenizerKind((_SEED,)): ("seed-coder",),
    PreTokenizerKind((_VIKING, r"\p{N}")): ("viking",),
    PreTokenizerKind((r"\p{N}{1,3}", _MINICPM5), ignores_merges=True): ("minicpm5",),
}  # fmt: skip
PRETOKENIZERS = {name: kind for kind, names in KINDS.items() for name in names}


def pre_tokenizer_kind(name: object, file_name: str) -> PreTokenizerKind:
    """Return the pre-tokenizer kind of a name. Raises ModelError for an unknown name, as kinds differ in token ids."""
    kind = PRETOKENIZERS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ModelError(
            f"{file_name}: tokenizer.ggml.pre = {str(name)[:40]!r} is not supported "
            f"(supported: {', '.join(sorted(PRETOKENIZERS))}); download a newer file of this model"
        )
    return kind


def pre_tokenizer(kind: PreTokenizerKind, missing: Collection[str]) -> PreTokenizer:
    """Return the pre-tokenizer of a kind. It splits a text and maps its bytes to their characters.

    missing: characters without a token. They are removed, and the pieces around them are not merged.
    """
    steps: list[PreTokenizer] = [Split(Regex(expression), "isolated") for expression in kind.expressions]
    steps.append(ByteLevel(add_prefix_space=False, use_regex=False))
    if missing:
        steps.append(Split(Regex(f"[{''.join(sorted(missing))}]"), "removed"))
    return Sequence(steps)


TEMPLATE = "tokenizer.chat_template"
TOKEN_KEYS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
         "pad_token": "padding_token_id", "sep_token": "seperator_token_id", "mask_token": "mask_token_id"}  # fmt: skip
"""Metadata keys of special tokens, by chat templates' names. The misspelt key is the format's."""
DEFAULTS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}
"""Ids of special tokens of SentencePiece models whose metadata lack them."""
NEEDED = frozenset("ĊĠ").union(map(chr, range(0x21, 0x7F)))
"""Bytes of plain English in byte-level BPE's characters. Some vocabularies lack bytes absent from their corpus."""
MOST_ADDED = 1 << 21
"""Largest total of added tokens' characters. The library takes long to prepare them, and 100 bytes per character."""
_BLANK = "▁"


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """A tokenizer from metadata: the contents of tokenizer files, and whether texts get BOS and EOS."""

    files: TokenizerFiles
    eos_ids: frozenset[int]
    adds_bos: bool
    adds_eos: bool


def read_gguf_tokenizer(metadata: Mapping[str, Any], file_name: str) -> GGUFTokenizer:
    """Build the tokenizer from the metadata of the file `file_name`. Raises ModelError naming the wrong key."""
    vocabulary = read_vocabulary(metadata, file_name)
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{file_name}: tokenizer.ggml.model = {str(kind)[:40]!r} is not supported (supported: gpt2, llama)"
        )
    try:
        with _without_garbage_collection():
            core, default_bos = _byte_level(vocabulary) if kind == "gpt2" else _by_scores(vocabulary)
        core.add_tokens(_added_tokens(vocabulary))
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception
        vocabulary.fail(f"its tokenizer cannot be built ({' '.join(str(error).split())[:200]})")
    special_tokens = _special_tokens(vocabulary, DEFAULTS if kind == "llama" else {})
    add_flags = {"bos": vocabulary.flag("add_bos_token", default_bos), "eos": vocabulary.flag("add_eos_token", False)}
    _add_bos_and_eos(core, vocabulary, [name for name in add_flags if add_flags[name]], special_tokens)
    eos_ids = {vocabulary.ids[special_tokens["eos_token"]]} if "eos_token" in special_tokens else frozenset()
    files = TokenizerFiles(core, special_tokens, _templates(vocabulary))
    return GGUFTokenizer(files, end_ids(vocabulary) | eos_ids, add_flags["bos"], add_flags["eos"])


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Switch garbage collection off: building hundreds of thousands of merge tuples then takes a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _byte_level(vocabulary: GGUFVocabulary) -> tuple[Core, bool]:
    """Return byte-level BPE, and whether its texts begin with BOS by default."""
    kind = pre_tokenizer_kind(vocabulary.metadata.get("tokenizer.ggml.pre"), vocabulary.file_name)
    # Padding rows of the embedding have names that occur in no text.
    ids = {
        text: i
        for (text, i), token_kind in zip(vocabulary.ids.items(), vocabulary.kinds, strict=True)
        if token_kind != UNUSED
    }
    missing = set(ByteLevel.alphabet()) - ids.keys()
    if missing_bytes := sorted(missing & NEEDED):
        vocabulary.fail(f"tokenizer.ggml.tokens has no token for the byte that is written {missing_bytes[0]!r}")
    # Of equal merges the first counts; the library would take the last.
    merges: Any = [tuple(merge.split(" ", 1)) for merge in dict.fromkeys(vocabulary.texts("merges"))]
    core = Core(BPE(ids, merges, ignore_merges=kind.ignores_merges))
    core.pre_tokenizer = pre_tokenizer(kind, missing)
    core.decoder = decoders.ByteLevel()
    if kind.composes:
        core.normalizer = normalizers.NFC()
    return core, kind.bos


def _by_scores(vocabulary: GGUFVocabulary) -> tuple[Core, bool]:
    """Return BPE by scores, with byte fallback, and whether its texts begin with BOS by default: True."""
    ids = vocabulary.ids
    if missing := [text for text in (f"<0x{byte:02X}>" for byte in range(256)) if text not in ids]:
        vocabulary.fail(f"tokenizer.ggml.tokens lacks the byte token {missing[0]}")
    core = Core(BPE(dict(ids), merges_by_score(vocabulary), byte_fallback=True))
    adds_prefix = vocabulary.flag("add_space_prefix", True)
    prefix_steps = [normalizers.Prepend(_BLANK)] if adds_prefix else []
    core.normalizer = normalizers.Sequence([*prefix_steps, normalizers.Replace(" ", _BLANK)])
    strip_steps = [decoders.Strip(" ", 1, 0)] if adds_prefix else []
    core.decoder = decoders.Sequence(
        [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip_steps]
    )
    return core, True


def _added_tokens(vocabulary: GGUFVocabulary) -> list[AddedToken]:
    """Return tokens that are matched before the split. Special tokens are matched only if texts may hold them."""
    kinds = zip(vocabulary.ids, vocabulary.kinds, strict=True)
    added_texts = [(text, kind) for text, kind in kinds if kind in (CONTROL, UNKNOWN, USER_DEFINED)]
    if (length := sum(len(text) for text, _ in added_texts)) > MOST_ADDED:
        vocabulary.fail(f"control and user-defined tokens have {length:,} characters, more than {MOST_ADDED:,}")
    return [AddedToken(text, normalized=False, special=kind != USER_DEFINED) for text, kind in added_texts]


def _special_tokens(vocabulary: GGUFVocabulary, defaults: Mapping[str, int]) -> dict[str, str]:
    texts = list(vocabulary.ids)
    special_ids = {name: vocabulary.token_id(key, defaults.get(name)) for name, key in TOKEN_KEYS.items()}
    return {name: texts[i] for name, i in special_ids.items() if i is not None}


def _add_bos_and_eos(
    core: Core, vocabulary: GGUFVocabulary, added_names: list[str], special_tokens: Mapping[str, str]
) -> None:
    """Add BOS and EOS to texts, as `added_names` lists them. Raises ModelError if the file lacks their ids."""
    for name in added_names:
        if f"{name}_token" not in special_tokens:
            vocabulary.fail(f"tokenizer.ggml.add_{name}_token is true, but tokenizer.ggml.{name}_token_id is missing")
    if added_names:
        texts = {name: special_tokens[f"{name}_token"] for name in added_names}
        tokens = [{"id": name, "ids": [vocabulary.ids[text]], "tokens": [text]} for name, text in texts.items()]
        template = [*(["bos"] if "bos" in added_names else []), "$A", *(["eos"] if "eos" in added_names else [])]
        core.post_processor = TemplateProcessing(single=template, special_tokens=tokens)


def _templates(vocabulary: GGUFVocabulary) -> dict[str, str]:
    """Return chat templates by name. The unnamed one is `default`."""
    metadata = vocabulary.metadata
    templates = {}
    for key, template in metadata.items():
        name = "default" if key == TEMPLATE else key.removeprefix(f"{TEMPLATE}.")
        if key != TEMPLATE and name == key:
            continue
        if not isinstance(template, str):
            vocabulary.fail(f"{key} is no text")
        templates[name] = template
    return templates

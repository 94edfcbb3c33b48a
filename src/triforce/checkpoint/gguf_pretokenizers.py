"""Ways in which byte-level BPE tokenizers cut a text before they merge, by the names that GGUF files have for them.

A text is cut by each expression in turn, into what matches and what lies between. Names, and what each means, are those
of llama.cpp's `llama-vocab.cpp`, also where its expressions are approximations: all its letters outside ASCII are both
upper and lower case. Contractions are written out, as ones that ignore case would also match U+017F.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from triforce.errors import ModelError

_SUFFIX = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
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
    """A way to cut texts, and what else comes with its name."""

    expressions: tuple[str, ...]
    whole: bool = False
    """Whether a piece that is a token is taken as it is, without merges."""
    bos: bool = False
    """Whether texts begin with the first token where the file does not say."""
    composes: bool = False
    """Whether a text is normalised (NFC) before it is cut, as the family's own tokenizer does. No file says so, and
    llama.cpp does not."""


KINDS: dict[PreTokenizerKind, tuple[str, ...]] = {
    PreTokenizerKind((_GPT2,)): (
        "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "a.x-4.0",
        "mellum", "modern-bert", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de",
    ),
    PreTokenizerKind((r"\p{N}", _GPT2)): (
        "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2",
    ),
    PreTokenizerKind((_LLAMA3,), whole=True, bos=True): (
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
    ),
    PreTokenizerKind((_LLAMA3,)): ("dbrx", "smaug-bpe", "chatglm-bpe"),
    PreTokenizerKind((_LLAMA3,), whole=True): ("glm4", "glm5"),
    PreTokenizerKind((_QWEN2,), composes=True): ("qwen2",),
    PreTokenizerKind((_QWEN2,)): (
        "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "kormo", "f2llmv2", "solar-open", "grok-2",
    ),
    PreTokenizerKind((_QWEN35,), composes=True): ("qwen35",),
    PreTokenizerKind((_TEKKEN,), whole=True, bos=True): ("tekken",),
    PreTokenizerKind((_GPT4O,)): ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
    PreTokenizerKind((r"\p{N}{1,3}", _CHINESE, _DEEPSEEK3)): ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
    PreTokenizerKind((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EASTERN, r"\p{N}")): ("deepseek-coder",),
    PreTokenizerKind((_SEED,)): ("seed-coder",),
    PreTokenizerKind((_VIKING, r"\p{N}")): ("viking",),
    PreTokenizerKind((r"\p{N}{1,3}", _MINICPM5), whole=True): ("minicpm5",),
}  # fmt: skip
NAMES = {name: kind for kind, names in KINDS.items() for name in names}


def pre_tokenizer_kind(name: object, where: str) -> PreTokenizerKind:
    """The way of cutting that a file names. Raises ModelError for any other: to guess one would spoil the model."""
    kind = NAMES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ModelError(
            f"{where}: tokenizer.ggml.pre = {str(name)[:40]!r} is not supported "
            f"(supported: {', '.join(sorted(NAMES))}); download a newer file of this model"
        )
    return kind


def pre_tokenizer(kind: PreTokenizerKind, missing: Collection[str]) -> PreTokenizer:
    """Return what cuts a text so, and writes its bytes as the characters that stand for them.

    Characters that are no token are left out, but what stands around them is not merged.
    """
    steps: list[PreTokenizer] = [Split(Regex(expression), "isolated") for expression in kind.expressions]
    steps.append(ByteLevel(add_prefix_space=False, use_regex=False))
    if missing:
        steps.append(Split(Regex(f"[{''.join(sorted(missing))}]"), "removed"))
    return Sequence(steps)

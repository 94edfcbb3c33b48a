"""The vocabulary of a GGUF file: its tokens, their kinds, and which of them end a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from triforce.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens, as numbers in `tokenizer.ggml.token_type`."""
PREFIX = "tokenizer.ggml."
_BAR = "\uff5c"

ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", f"<{_BAR}end▁of▁sentence{_BAR}>", "[e~[",
})  # fmt: skip
"""Tokens that end a text even if the metadata do not say so, as in llama.cpp."""
AMBIGUOUS_END = "</s>"
"""Token of `ENDS` that is also an HTML end tag. A normal token of this text stays normal, as in Qwen's vocabulary."""
CODE_ENDS = {
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep_token_id": ("<|file_sep|>",),
}
"""Tokens between files of code, which also end a text: by metadata key, and by text if the key is missing."""
VISIBLE_MARKS = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})
"""Marks that are part of the output text of OpenAI's models."""
HARMONY = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"}, {"<|call|>", "<|flush|>"})
"""Pairs of tokens. In a vocabulary with one of the pairs, `<|end|>` ends a message and not the text."""


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """Checked tokens of a GGUF file."""

    metadata: Mapping[str, Any]
    file_name: str
    """The name of the file, for messages."""
    ids: Mapping[str, int]
    """Each token's id, in the order of ids."""
    kinds: list[int]

    def token_id(self, name: str, default: int | None = None) -> int | None:
        """Return the id under a key such as `bos_token_id`. Raises ModelError if no token has it."""
        value = self.metadata.get(PREFIX + name)
        if value is None:
            return default if default is not None and default < len(self.ids) else None
        if type(value) is not int or not 0 <= value < len(self.ids):
            self.fail(f"{PREFIX}{name} is no id below {len(self.ids)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return the flag under a key such as `add_bos_token`. Raises ModelError if it is no boolean."""
        value = self.metadata.get(PREFIX + name, default)
        if type(value) is not bool:
            self.fail(f"{PREFIX}{name} is neither true nor false")
        return value

    def numbers(self, name: str) -> list[Any]:
        """Return the numbers under a key, one for each token. Raises ModelError for another count."""
        values = self.metadata.get(PREFIX + name)
        if not isinstance(values, np.ndarray) or len(values) != len(self.ids):
            self.fail(f"{PREFIX}{name} is no list of {len(self.ids)} numbers, one for each token")
        numbers: list[Any] = values.tolist()
        return numbers

    def texts(self, name: str) -> list[str]:
        """Return the texts under a key. Raises ModelError if it holds no list."""
        values = self.metadata.get(PREFIX + name)
        if not isinstance(values, list):
            self.fail(f"{PREFIX}{name} is no list of texts")
        return values

    def fail(self, reason: str) -> NoReturn:
        raise ModelError(f"{self.file_name}: {reason}; download another file of this model")


def read_vocabulary(metadata: Mapping[str, Any], file_name: str) -> GGUFVocabulary:
    """Read a file's tokens. file_name: the file's name, for messages. Raises ModelError for no tokens or duplicates."""
    tokens = GGUFVocabulary(metadata, file_name, {}, []).texts("tokens")
    ids = {text or f"[EMPTY_{i}]": i for i, text in enumerate(tokens)}
    vocabulary = GGUFVocabulary(metadata, file_name, ids, [NORMAL] * len(tokens))
    if len(ids) < max(len(tokens), 1):
        vocabulary.fail(f"{PREFIX}tokens has {len(tokens)} tokens, and only {len(ids)} different ones")
    if PREFIX + "token_type" in metadata:
        vocabulary.kinds[:] = vocabulary.numbers("token_type")
    harmony = {"<|end|>"} if any(pair <= ids.keys() for pair in HARMONY) else set()
    for texts, kind in (
        (ENDS.union(*CODE_ENDS.values()) - {AMBIGUOUS_END}, CONTROL),
        (VISIBLE_MARKS | harmony, USER_DEFINED),
    ):
        for text in texts & ids.keys():
            vocabulary.kinds[ids[text]] = kind
    return vocabulary


def end_ids(vocabulary: GGUFVocabulary) -> frozenset[int]:
    """Return ids that end a text: ids in the metadata, and ids of tokens with a known text."""
    ids = vocabulary.ids
    metadata_ids = [vocabulary.token_id(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    default_ids = [ids[text] for text in ENDS & ids.keys() if vocabulary.kinds[ids[text]] == CONTROL]
    code_ids = [vocabulary.token_id(key) for key in CODE_ENDS]
    for id_, texts in zip(list(code_ids), CODE_ENDS.values(), strict=True):
        code_ids += [ids[text] for text in texts if text in ids] if id_ is None else []
    return frozenset(id_ for id_ in (*metadata_ids, *default_ids, *code_ids) if id_ is not None)

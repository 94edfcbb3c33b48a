"""Ids of a real tokenizer are llama.cpp's, on a book and on all kinds of characters."""

from __future__ import annotations

import pytest

from tests.helpers import llama_oracle
from tests.helpers.gguf_files import SMOLLM2
from tests.helpers.unicode_texts import every_character, unicode_texts
from tests.helpers.vocabularies import compare
from triforce.checkpoint.gguf import tokenizer
from triforce.checkpoint.gguf.tokenizer import PRETOKENIZERS
from triforce.cli.bench.setup import own_texts

pytestmark = [
    llama_oracle.NEEDED,
    pytest.mark.skipif(not SMOLLM2.exists(), reason=f"there is no {SMOLLM2.name}"),
]


def test_real_tokenizer_gives_ids_of_llama_cpp() -> None:
    differences = compare(SMOLLM2, [*own_texts().values(), *unicode_texts(3000), *every_character()[::20]])
    assert differences.texts == differences.ends == differences.pieces == [] and differences.tokens > 500_000


def test_other_pre_tokenizer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pre-tokenizer of Llama 3 keeps three digits together."""
    monkeypatch.setattr(tokenizer, "pre_tokenizer_kind", lambda *_: PRETOKENIZERS["llama-bpe"])
    assert compare(SMOLLM2, unicode_texts(300)).texts

"""Tokenizers of GGUF files: ids of transformers, of llama.cpp where recorded, and of slow BPE by scores."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pytest
from tokenizers import normalizers

from tests.helpers.gguf_files import SMOLLM2, Values, byte_level_values, score_values, write_gguf
from tests.helpers.tiny_checkpoint import ours, tiny_tokenizer
from triforce.checkpoint.gguf.file import GGUFFile
from triforce.checkpoint.gguf.tokenizer import PRETOKENIZERS, GGUFTokenizer, pre_tokenizer, read_gguf_tokenizer
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.errors import ModelError

TEXTS = ["the cat sat", " the  mat\n\n\tnaïve café — 東京 🙂", "x</s>the<s>", "", "\x00\x1d\u2003…", "HE'S 12345 don't"]
QWEN = os.environ.get("TRIFORCE_QWEN2_5_CODER_0_5B")
RECORDED = json.loads((Path(__file__).parents[1] / "data" / "gguf_smollm2_ids.json").read_text(encoding="utf-8"))


def read(values: Values) -> GGUFTokenizer:
    return read_gguf_tokenizer(values, "x.gguf")


def tokenizer(gguf_tokenizer: GGUFTokenizer) -> Tokenizer:
    return Tokenizer(gguf_tokenizer.files, gguf_tokenizer.eos_ids)


def ids_of(gguf_tokenizer: GGUFTokenizer, text: str) -> list[int]:
    return tokenizer(gguf_tokenizer).encode(text, add_special=False)


def with_values(values: Values, **changes: Any) -> Values:
    """Return the metadata with other values. `...` removes a value."""
    merged = values | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return {key: value for key, value in merged.items() if value is not ...}


def test_byte_level_ids_and_texts_equal_transformers() -> None:
    file_tokenizer = tokenizer(read(byte_level_values()))
    theirs = ours(tiny_tokenizer(), (1,))
    for text in TEXTS:
        ids = file_tokenizer.encode(text)
        assert ids == theirs.encode(text)
        assert file_tokenizer.decode(ids) == theirs.decode(ids)
    file_tokenizer.require_same_vocabulary(theirs, ("the file", "the folder"))
    assert (file_tokenizer.eos_ids, file_tokenizer.special_ids, file_tokenizer.vocab_size) == (
        theirs.eos_ids,
        theirs.special_ids,
        297,
    )


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_first_and_last_tokens_are_set_as_the_file_says(bos: bool, eos: bool) -> None:
    plain = tokenizer(read(byte_level_values())).encode("the cat")
    gguf_tokenizer = read(byte_level_values(add_bos_token=bos, add_eos_token=eos))
    assert (gguf_tokenizer.adds_bos, gguf_tokenizer.adds_eos) == (bos, eos)
    assert tokenizer(gguf_tokenizer).encode("the cat") == [0] * bos + plain + [1] * eos
    assert ids_of(gguf_tokenizer, "the cat") == plain


def test_first_token_is_set_by_default_where_llama_cpp_sets_it() -> None:
    assert not read(byte_level_values(pre="qwen2")).adds_bos
    assert read(byte_level_values(pre="llama-bpe")).adds_bos
    assert read(score_values(["▁", "a"])).adds_bos


def pieces(name: str, text: str) -> list[str]:
    """Return the cut pieces of a text, as text."""
    cut = pre_tokenizer(PRETOKENIZERS[name], ()).pre_tokenize_str(text)
    return [text[begin:end] for _, (begin, end) in cut]


@pytest.mark.parametrize(
    ("name", "cut_text"),
    [
        ("gpt-2", "I|'ll| x|'|LL|  | a| 1234|\r\n\n"),
        ("smollm", "I|'ll| x|'|LL|  | a| |1|2|3|4|\r\n\n"),
        ("llama-bpe", "I|'ll| x|'LL|  | a| |123|4|\r\n\n"),
        ("qwen2", "I|'ll| x|'LL|  | a| |1|2|3|4|\r\n\n"),
        ("tekken", "I|'ll| x|'LL|  | a| |1|2|3|4|\r\n\n"),
        ("gpt-4o", "I'll| x'LL|  | a| |123|4|\r\n\n"),
        ("deepseek-v3", "I|'ll| x|'LL|  | a| |123|4|\r\n\n"),
        ("deepseek-coder", "I|'|ll| x|'|LL|  | a| |1|2|3|4|\r|\n|\n"),
        ("seed-coder", "I|'ll| x|'LL|  | a| |1|2|3|4|\r\n\n"),
    ],
)
def test_texts_are_cut_as_their_name_says(name: str, cut_text: str) -> None:
    assert "|".join(pieces(name, cut_text.replace("|", ""))) == cut_text


COMPOSED = "각 việt naïve \uff21\ufb01 東京\u0301"
"""Letters with marks, and compatible characters, which NFC leaves unchanged."""


@pytest.mark.parametrize("name", ["qwen2", "qwen35"])
def test_qwen_decomposed_texts_have_ids_of_composed_ones(name: str) -> None:
    hf = tiny_tokenizer()
    gguf_tokenizer = read(byte_level_values(pre=name))
    folder = ours(hf)
    hf.backend_tokenizer.normalizer = normalizers.NFC()
    hf.backend_tokenizer.pre_tokenizer = pre_tokenizer(PRETOKENIZERS[name], ())
    decomposed = normalize("NFD", COMPOSED)
    assert decomposed != COMPOSED
    assert ids_of(gguf_tokenizer, decomposed) == ids_of(gguf_tokenizer, COMPOSED) == folder.encode(decomposed)
    assert tokenizer(gguf_tokenizer).decode(ids_of(gguf_tokenizer, decomposed)) == COMPOSED


def test_other_families_decomposed_texts_stay_decomposed() -> None:
    gguf_tokenizer = read(byte_level_values(pre="llama3", add_bos_token=False))
    decomposed = normalize("NFD", COMPOSED)
    assert tokenizer(gguf_tokenizer).decode(ids_of(gguf_tokenizer, decomposed)) == decomposed


@pytest.mark.slow
@pytest.mark.skipif(QWEN is None, reason="TRIFORCE_QWEN2_5_CODER_0_5B names no GGUF file of Qwen2.5-Coder 0.5B")
def test_real_qwen_decomposed_texts_have_ids_of_composed_ones() -> None:
    assert QWEN
    gguf_tokenizer = read_gguf_tokenizer(GGUFFile(Path(QWEN)).metadata, QWEN)
    for text in ("한국어 문장은 여러 음절로 되어 있다. " * 50, "Tiếng Việt có nhiều dấu thanh. " * 50, COMPOSED):
        assert ids_of(gguf_tokenizer, normalize("NFD", text)) == ids_of(gguf_tokenizer, text)
    assert len(ids_of(gguf_tokenizer, normalize("NFD", "한국어 문장"))) < 8


def test_names_of_one_kind_stand_once() -> None:
    assert {"llama3", "llama-bpe", "qwen2", "deepseek-r1-qwen", "smollm", "tekken", "gpt-2"} <= set(PRETOKENIZERS)
    assert (
        PRETOKENIZERS["llama3"] is PRETOKENIZERS["llama-bpe"]
        and PRETOKENIZERS["megrez"] is PRETOKENIZERS["deepseek-r1-qwen"]
    )


def test_whole_token_is_taken_without_merges() -> None:
    values = byte_level_values()
    tokens, merges = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.merges"]
    tokens[299], values["tokenizer.ggml.token_type"][299] = "zq", 1
    assert merges and len(ids_of(read(values), "zq")) == 2
    assert ids_of(read(with_values(values, pre="llama3", add_bos_token=False)), "zq") == [299]


def test_bytes_without_token_are_left_out_and_part_their_neighbours() -> None:
    values = byte_level_values()
    tokens = values["tokenizer.ggml.tokens"]
    tokens[tokens.index("ć")] = "instead"  # byte 7
    file_tokenizer = tokenizer(read(values))
    separate_ids = [tokens.index("a"), tokens.index("t")]
    assert (file_tokenizer.encode("at"), file_tokenizer.encode("a\x07t")) == ([tokens.index("at")], separate_ids)


def test_kinds_of_tokens_are_found_in_texts() -> None:
    values = byte_level_values()
    tokens = values["tokenizer.ggml.tokens"]
    kinds = values["tokenizer.ggml.token_type"]
    tokens[297:] = ["<tool>", "<think>", "<|im_end|>"]
    kinds[297:] = [3, 4, 1]
    gguf_tokenizer = read(values)
    assert ids_of(gguf_tokenizer, "<tool><think><|im_end|>") == [297, 298, 299]
    assert tokenizer(gguf_tokenizer).decode([297, 298, 299]) == "<think>"
    assert gguf_tokenizer.eos_ids == {1, 299}  # the text of a token decides, for any kind
    gguf_tokenizer.files.core.encode_special_tokens = True
    assert 297 not in ids_of(gguf_tokenizer, "<tool>") and 298 in ids_of(gguf_tokenizer, "<think>")


def test_ends_are_those_of_keys_and_texts() -> None:
    values = byte_level_values(eot_token_id=5, eom_token_id=6)
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    tokens[297:], kinds[297:] = ["<|endoftext|>", "<|file_sep|>", "<|end|>"], [3, 3, 3]
    assert read(values).eos_ids == {1, 5, 6, 297, 298, 299}
    tokens[297:299] = ["<|return|>", "<|call|>"]  # where `<|end|>` ends a message
    assert read(values).eos_ids == {1, 5, 6, 297, 298}
    tokens[297:] = ["</s>", "</t>", "</u>"]
    tokens[1], kinds[297:] = "</x>", [1, 3, 3]
    assert read(values).eos_ids == {1, 5, 6}  # a tag of HTML
    kinds[297] = 3
    assert read(values).eos_ids == {1, 5, 6, 297}


def test_templates_come_by_name() -> None:
    names = {"tokenizer.chat_template": "{{ a }}", "tokenizer.chat_template.tool_use": "{{ b }}"}
    values = byte_level_values() | names | {"tokenizer.chat_templates": ["tool_use"]}
    assert read(values).files.templates == {"default": "{{ a }}", "tool_use": "{{ b }}"}
    assert read(byte_level_values()).files.special == {"bos_token": "<s>", "eos_token": "</s>"}
    with pytest.raises(ModelError, match=r"tokenizer\.chat_template is no text"):
        read(values | {"tokenizer.chat_template": 3})


MANY = [f"{i:0500}" for i in range(4200)]
BYTES, SCORES = byte_level_values(), score_values(["▁", "a"])
INCONSISTENT: dict[str, tuple[Values, str]] = {
    "model": (with_values(BYTES, model="bert"), r"tokenizer.ggml.model = 'bert' .*supported: gpt2, llama"),
    "no model": (with_values(BYTES, model=...), "tokenizer.ggml.model = 'None'"),
    "no name": (with_values(BYTES, pre=...), "tokenizer.ggml.pre = 'None' is not supported"),
    "default": (with_values(BYTES, pre="default"), "tokenizer.ggml.pre = 'default' is not supported .*qwen2"),
    "unknown": (with_values(BYTES, pre="my-bpe"), "tokenizer.ggml.pre = 'my-bpe'"),
    "strange": (with_values(BYTES, pre=["a"]), "tokenizer.ggml.pre = "),
    "no tokens": (with_values(BYTES, tokens=...), "tokenizer.ggml.tokens is no list of texts"),
    "empty": (with_values(BYTES, tokens=[]), "tokens has 0 tokens"),
    "twice": (with_values(BYTES, tokens=["a", "a", "b"], token_type=...), "has 3 tokens, of which 2 are different"),
    "kinds": (with_values(BYTES, token_type=np.array([1], np.int32)), "token_type is no list of 300 numbers"),
    "no merges": (with_values(BYTES, merges=...), "tokenizer.ggml.merges is no list of texts"),
    "merge": (with_values(BYTES, merges=["the zebra"]), "cannot be built .*zebra.* out of vocabulary"),
    "half": (with_values(BYTES, merges=["the"]), "its tokenizer cannot be built"),
    "no bytes": (with_values(BYTES, tokens=["a", "b"], token_type=..., merges=[]), "has no token for the byte .* '!'"),
    "id": (with_values(BYTES, bos_token_id=300), "tokenizer.ggml.bos_token_id is no id below 300"),
    "id of a text": (with_values(BYTES, eos_token_id="</s>"), "tokenizer.ggml.eos_token_id is no id"),
    "flag": (with_values(BYTES, add_bos_token=1), "add_bos_token is neither true nor false"),
    "no first": (with_values(BYTES, add_bos_token=True, bos_token_id=...), "bos_token_id is missing"),
    "no scores": (with_values(SCORES, scores=...), "tokenizer.ggml.scores is no list of"),
    "scores": (with_values(SCORES, scores=np.zeros(3, np.float32)), "tokenizer.ggml.scores is no list of"),
    "no byte tokens": (with_values(SCORES, tokens=["a"], token_type=...), "lacks the byte token <0x00>"),
    "many": (score_values(["a", *MANY], kinds=dict.fromkeys(MANY, 3)), "characters, more than 2,097,152"),
    "long": (score_values(["x", "x" * 2000]), "has 2000 characters, more than 512"),
}  # fmt: skip


@pytest.mark.parametrize("case", INCONSISTENT)
def test_inconsistent_metadata_raise_model_error(case: str) -> None:
    values, match = INCONSISTENT[case]
    with pytest.raises(ModelError, match=match) as caught:
        read(values)
    assert str(caught.value).startswith("x.gguf: ") and "\n" not in str(caught.value)


def test_tokenizer_written_to_a_file_comes_back(tmp_path: Path) -> None:
    for values in (byte_level_values(), SCORES):
        file = GGUFFile(write_gguf(tmp_path / "x.gguf", values, {}))
        file_tokenizer = read_gguf_tokenizer(file.metadata, "x.gguf")
        value_tokenizer = read(values)
        assert [ids_of(file_tokenizer, text) for text in TEXTS] == [ids_of(value_tokenizer, text) for text in TEXTS]


@pytest.mark.skipif(not SMOLLM2.exists(), reason=f"there is no {SMOLLM2.name}")
def test_real_tokenizer_gives_recorded_ids_of_llama_cpp() -> None:
    """Ids are recorded with llama-cpp-python 0.3.36: special tokens parsed, no first token."""
    gguf_tokenizer = read_gguf_tokenizer(GGUFFile(SMOLLM2).metadata, SMOLLM2.name)
    assert sorted(gguf_tokenizer.eos_ids) == RECORDED["eos_ids"]
    assert (gguf_tokenizer.adds_bos, gguf_tokenizer.adds_eos) == (False, False)
    full_tokenizer = tokenizer(gguf_tokenizer)
    for text, ids in zip(RECORDED["texts"], RECORDED["ids"], strict=True):
        assert full_tokenizer.encode(text, add_special=False) == ids, text

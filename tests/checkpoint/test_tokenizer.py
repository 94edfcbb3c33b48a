"""Text to ids and back: a stream gives the text of `decode` in whole characters. Vocabularies compare by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from tests.helpers.tiny_checkpoint import edit, ours, tiny_tokenizer
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.checkpoint.tokenizer_files import TokenizerFiles
from triforce.errors import ModelError, RequestError

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}bot:{% endif %}"
)


def llama2_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer as of Llama 2 and Mistral: words with a leading space mark, other text as bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "ab", "東"]
    merges = [("▁", "a"), ("a", "b")]
    core = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["<s>", "</s>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


BYTES = ours(tiny_tokenizer(), {1})
FALLBACK = ours(llama2_tokenizer(), {2})
REFERENCE = {BYTES: tiny_tokenizer().backend_tokenizer, FALLBACK: llama2_tokenizer().backend_tokenizer}
BOTH = pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["byte-level", "byte-fallback"])
TEXTS = [
    "the cat",
    "naïve café",
    "東京都",
    "🙂👩‍👩‍👧🇫🇷",
    "a  b\n\n\tc ",
    " lead",
    "",
    "é" * 9,
    "replacement � itself",
    "<s>x</s>",
]


@BOTH
@pytest.mark.parametrize("text", ["the cat", "naïve café — 東京 🙂", "a  b\n\n\tc "])
def test_token_bytes_join_to_text(tokenizer: Tokenizer, text: str) -> None:
    written = b"".join(tokenizer.bytes_of(i) for i in tokenizer.encode(text))
    assert written.decode().removeprefix(" ") == text


def test_token_bytes_of_special_and_unknown_tokens() -> None:
    assert [BYTES.bytes_of(i) for i in (0, 1, 10_000)] == [b"<s>", b"</s>", b""]


class CountedCore:
    """A tokenizer of the library that counts how often its table of added tokens is built."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        self._core, self.tables = core, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def get_added_tokens_decoder(self) -> Any:
        self.tables += 1
        return self._core.get_added_tokens_decoder()


def test_table_of_added_tokens_is_built_once() -> None:
    """Gemma 3 has 6,414 added tokens: one table takes 10 ms, and the alternatives of one token asked for 20 tables."""
    hf = tiny_tokenizer()
    hf.add_tokens([f"<unused{i}>" for i in range(3000)])
    core: Any = CountedCore(hf.backend_tokenizer)
    tokenizer = Tokenizer(TokenizerFiles(core, {}, {}), frozenset())
    assert core.tables == 0
    texts = [tokenizer.bytes_of(i) for i in range(len(hf)) for _ in range(2)]
    assert texts[-1] == b"<unused2999>" and tokenizer.all_bytes() == texts[::2]
    assert tokenizer.special_ids == {0, 1} and core.tables == 1


def test_highest_id_is_that_of_a_token_below_the_rows() -> None:
    hf = tiny_tokenizer()
    for rows, vocab_size in ((None, 297), (280, 280), (297, 297), (400, 297), (500_000, 297), (1 << 40, 297)):
        assert ours(hf, rows=rows).vocab_size == vocab_size
    with pytest.raises(ModelError, match="no token that the model has an embedding for"):
        ours(hf, rows=0)


def pieces(tokenizer: Tokenizer, ids: list[int], context_ids: list[int] | tuple[()] = ()) -> list[str]:
    stream = tokenizer.stream(context_ids)
    return [*(stream.step(i) for i in ids), stream.flush()]


@BOTH
@pytest.mark.parametrize("text", TEXTS)
def test_encode_decode_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    plain = text.replace("<s>", "").replace("</s>", "")
    assert tokenizer.decode(ids) == "".join(pieces(tokenizer, ids)) == REFERENCE[tokenizer].decode(ids) == plain
    if "�" not in text:
        assert not any("�" in piece for piece in pieces(tokenizer, ids))


@given(st.text())
def test_stream_of_text_equals_decode(text: str) -> None:
    for tokenizer in (BYTES, FALLBACK):
        ids = tokenizer.encode(text)
        assert "".join(pieces(tokenizer, ids)) == REFERENCE[tokenizer].decode(ids)


@given(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=40))
def test_stream_of_random_tokens_equals_decode(ids: list[int]) -> None:
    assert "".join(pieces(BYTES, ids)) == BYTES.decode(ids) == REFERENCE[BYTES].decode(ids)


@given(st.lists(st.integers(0, FALLBACK.vocab_size - 1), max_size=40))
def test_stream_of_byte_fallback_tokens_equals_decode(ids: list[int]) -> None:
    assert "".join(pieces(FALLBACK, ids)) == FALLBACK.decode(ids)


@given(st.binary(max_size=30))
def test_stream_holds_incomplete_characters(raw: bytes) -> None:
    """Pieces before the flush end only in characters that the bytes hold, or before bytes that hold no character."""
    ids = [REFERENCE[BYTES].token_to_id(c) for c in map(byte_symbol, raw)]
    shown = ""
    for i, piece in enumerate(pieces(BYTES, ids)[:-1]):
        shown += piece
        assert raw[: i + 1].decode(errors="replace").startswith(shown)
        assert not piece.endswith("�")


def byte_symbol(byte: int) -> str:
    """Return GPT-2's printable character for a byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte if byte in shown else 256 + [b for b in range(256) if b not in shown].index(byte))


@BOTH
def test_continuation_keeps_leading_space(tokenizer: Tokenizer) -> None:
    context_ids = tokenizer.encode("a東 b")
    ids = tokenizer.encode(" a b", add_special=False)
    new = "".join(pieces(tokenizer, ids, context_ids))
    assert new == REFERENCE[tokenizer].decode(context_ids + ids)[len("a東 b") :]
    assert new.startswith(" ")


def test_continuation_after_incomplete_character() -> None:
    ids = BYTES.encode("🙂")
    assert "".join(pieces(BYTES, ids[2:], ids[:2])) == BYTES.decode(ids[2:])


def test_special_tokens_are_not_decoded() -> None:
    assert BYTES.decode([0, *BYTES.encode("hat"), 1]) == "hat"


def test_encode_of_non_text_raises() -> None:
    with pytest.raises(RequestError, match="not valid UTF-8"):
        BYTES.encode("a\udcff")


def test_tokens_without_embedding_row_are_hidden() -> None:
    cut = ours(tiny_tokenizer(), {1, 290, 999}, rows=280)
    assert cut.vocab_size == 280 and cut.eos_ids == {1}
    with pytest.raises(RequestError, match="no embedding"):
        cut.encode("the cat sat on the mat")


def test_added_tokens_are_counted() -> None:
    hf = tiny_tokenizer()
    n = len(hf)
    hf.add_tokens(["<tool>"])
    assert ours(hf).vocab_size == n + 1


def test_eos_ids_are_collected_from_all_files(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 5}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_ids == {1, 5, 6, 7}
    assert tokenizer.encode("the cat") == tiny_tokenizer().encode("the cat")


def test_prompts_are_never_truncated(tmp_path: Path) -> None:
    hf = tiny_tokenizer()
    hf.backend_tokenizer.enable_truncation(4)
    hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert len(Tokenizer.load(tmp_path).encode("xyz " * 50)) > 100


def test_chat_template_encodes_turns() -> None:
    tokenizer = ours(tiny_tokenizer(chat_template=TEMPLATE))
    messages = [{"role": "user", "content": "hat"}]
    assert tokenizer.chat(messages) == tokenizer.encode("<s>user: hat</s>bot:", add_special=False)
    with pytest.raises(RequestError, match="has no chat template; give a text to generate"):
        BYTES.chat(messages)
    picky = ours(tiny_tokenizer(chat_template="{{ raise_exception('only users') }}"))
    with pytest.raises(RequestError, match="only users"):
        picky.chat(messages)


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["bytes", "fallback"])
def test_text_of_token_tells_bytes_apart(tokenizer: Tokenizer) -> None:
    parts = [i for i in tokenizer.encode("\U0001f600") if tokenizer.text_of(i).startswith("<0x")]
    assert "".join(map(tokenizer.text_of, parts)) == "<0xF0><0x9F><0x98><0x80>"
    assert [tokenizer.text_of(i) for i in tokenizer.encode("A")][-1] in ("A", " A")


def test_vocabularies_are_compared_by_token() -> None:
    BYTES.require_same_vocabulary(ours(tiny_tokenizer()), ("target", "draft"))
    with pytest.raises(ModelError, match=r"big and small do not share.*token 290 is '.+' in the first and None"):
        BYTES.require_same_vocabulary(ours(tiny_tokenizer(290)), ("big", "small"))
    with pytest.raises(ModelError, match=r"token 0 is '<s>' in the first and '<unk>'"):
        BYTES.require_same_vocabulary(FALLBACK, ("big", "small"))


def test_tokenizer_broken_files_raise(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded"):
        Tokenizer.load(tmp_path)


def test_tokenizer_folder_code_is_not_run(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nothing", "auto_map": {"AutoConfig": "evil.Config"}}')
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    edit(tmp_path / "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": [None, "evil.Evil"]})
    assert Tokenizer.load(tmp_path).encode("the cat") == tiny_tokenizer().encode("the cat")
    (tmp_path / "tokenizer.json").rename(tmp_path / "vocab.json")
    with pytest.raises(ModelError, match=r"there is no tokenizer.json, and transformers cannot make one"):
        Tokenizer.load(tmp_path)

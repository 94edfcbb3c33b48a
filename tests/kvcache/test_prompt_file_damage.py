"""A saved prompt that is damaged, or another model's, is never loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.saved_prompt import MAKER, PROMPT, loaded
from tests.helpers.small_decoder import make_pool, prefill, small_decoder, text
from tests.helpers.tiny_checkpoint import save as save_model
from tests.helpers.tiny_checkpoint import tiny_model
from tests.helpers.tiny_llm import CONTEXT, ask
from triforce.backends import dispatch
from triforce.disk_cache import prompt_file
from triforce.errors import CacheError
from triforce.kvcache import FullView
from triforce.llm import LLM

torch.set_num_threads(1)


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    decoder = small_decoder(dtype="float32")
    full = FullView(make_pool(decoder, 1, 32))
    prefill(decoder, full, 0, text(20))
    prompt_file.save(tmp_path / "small.kv", MAKER, full, 0, text(20))
    assert len(loaded(tmp_path / "small.kv").ids) == 20
    return tmp_path / "small.kv"


def refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(CacheError) as caught:
        loaded(path)
    assert str(path) in str(caught.value)


def regions(data: bytes) -> dict[str, range]:
    """Return the byte ranges of a safetensors file's parts."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    start = 8 + size
    parts = {"size": range(8), "header": range(8, start)}
    for name, tensor_header in header.items():
        if name != "__metadata__":
            parts[name] = range(*(start + offset for offset in tensor_header["data_offsets"]))
    assert sum(map(len, parts.values())) == len(data)
    return parts


def test_flipped_byte_in_region_raises(small_file: Path) -> None:
    """Every byte of small regions, and ends and middle of large ones, are flipped by one bit and by all."""
    data = small_file.read_bytes()
    for where in regions(data).values():
        region_is_small = len(where) <= 32
        for at in where if region_is_small else {where[0], where[1], where[len(where) // 2], where[-2], where[-1]}:
            for flip in (1, 0x80, 0xFF):
                refused(small_file, data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])


@pytest.mark.parametrize("flip", [1, 0x20])
def test_flipped_header_byte_raises(small_file: Path, flip: int) -> None:
    data = small_file.read_bytes()
    for at in regions(data)["header"]:
        refused(small_file, data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_flipped_bit_anywhere_raises(small_file: Path) -> None:
    data = small_file.read_bytes()
    for at in range(len(data)):
        for bit in range(8):
            refused(small_file, data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])


@pytest.mark.parametrize(
    ("valid_text", "contradicting_text"),
    [
        (b'"U8"', b'"I8"'), (b'"I64"', b'"F64"'), (b'"ids"', b'"idx"'), (b'"checksum"', b'"checksun"'),
        (b'"keys.0"', b'"keys.2"'), (b'"F32"', b'"I32"'), (b"triforce-entry-1", b"triforce-entry-2"),
        (b"__metadata__", b"__netadata__"), (b"fingerprint", b"fingerprins"), (b"[20]", b"[02]"), (b"[32]", b"[31]"),
        (b'"kind": "prompt"', b'"kind": "prompf"'),
    ],
)  # fmt: skip
def test_contradicting_header_raises(small_file: Path, valid_text: bytes, contradicting_text: bytes) -> None:
    data = small_file.read_bytes()
    assert valid_text in data
    refused(small_file, data.replace(valid_text, contradicting_text, 1))


def test_truncated_or_extended_file_raises(small_file: Path) -> None:
    data = small_file.read_bytes()
    ends = {0, 1, 7, 8, 9, len(data) // 2, len(data) - 33, len(data) - 32, len(data) - 1}
    for end in ends | {where.start for where in regions(data).values()}:
        refused(small_file, data[:end])
    refused(small_file, data + b"\0")
    refused(small_file, b"\0" + data)


def test_foreign_files_raise(tmp_path: Path, pair: Path) -> None:
    refused(tmp_path / "empty", b"")
    refused(tmp_path / "text", b"It was the best of times, it was the worst of times, it was the age of wisdom")
    refused(tmp_path / "zeros", bytes(4096))
    refused(tmp_path / "model", (pair / "target" / "model.safetensors").read_bytes())
    for path in (tmp_path, tmp_path / "missing", tmp_path / "text" / "below a file"):
        with pytest.raises(CacheError, match=path.name):
            loaded(path)


def test_other_model_or_dtype_raises(pair: Path, saved_file: Path, tmp_path: Path) -> None:
    folder = save_model(tiny_model(max_position_embeddings=CONTEXT, rope_theta=5000.0), tmp_path / "other")
    for mismatched_model in (LLM(folder, None), LLM(pair / "target", None, dtype="float32"), LLM(pair / "draft", None)):
        with pytest.raises(CacheError, match="another model"):
            mismatched_model.generate(PROMPT, ask(), load_cache=saved_file)


@pytest.mark.parametrize("kernels", ["another level", "torch", "a chunk that only torch takes"])
def test_other_kernels_raise(pair: Path, saved_file: Path, monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """The bits of other kernels differ: their KV would not give the text of a fresh prefill."""
    native = dispatch.native
    if native is None or len(native.levels()) == 1:
        pytest.skip("there are no other kernels here")
    level = native.level()
    lowest = native.levels()[0]
    named = {"another level": lowest, "torch": "torch"}.get(kernels, f"{level} and torch")
    if kernels == "torch":
        monkeypatch.setattr(dispatch, "native", None)
    model = LLM(
        pair / "target", None, dtype="bfloat16", retrieval_budget=64, retrieval_chunk=8 if "chunk" in kernels else 16
    )
    if kernels == "another level":
        native.use(lowest)
    try:
        with pytest.raises(CacheError, match=rf"other kernels \({level}, .*; here {named}, .*\).*TRIFORCE_KERNELS"):
            model.generate(PROMPT, ask(), load_cache=saved_file)
    finally:
        native.use(level)


def test_missing_kernel_name_raises(small_file: Path) -> None:
    with pytest.raises(CacheError, match="other kernels"):
        prompt_file.SavedCache(small_file, MAKER._replace(kernels="others"))


def test_shorter_context_is_accepted(pair: Path, saved_file: Path) -> None:
    """The context length bounds the visible tokens and changes no computation."""
    short = LLM(pair / "target", None, context=300)
    expected_ids = short.generate(PROMPT, ask(max_tokens=8))[0].outputs[0].token_ids
    assert short.generate(PROMPT, ask(max_tokens=8), load_cache=saved_file)[0].outputs[0].token_ids == expected_ids

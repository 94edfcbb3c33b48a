"""Saved prompts: the text they give is that of a fresh prefill, and a file that is not whole is never believed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from small import CLOSE, VOCAB, assert_holds, dense, make_pool, prefill, small_decoder, text
from tiny_checkpoint import save as save_model
from tiny_checkpoint import tiny_model
from tiny_llm import CONTEXT, GREEDY, MODES, SEEDED, ask, counted, ids, llm

from triforce.cache import Full, saved
from triforce.cache.full import TAIL
from triforce.errors import CacheError
from triforce.kernels import extension
from triforce.llm import LLM

torch.set_num_threads(1)
MAKER = saved.Maker("fingerprint of a model", "kernels")
PROMPT = ids(150)


@pytest.fixture(scope="module")
def kept(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of PROMPT, saved by one mode."""
    path = tmp_path_factory.mktemp("kept") / "prompt.kv"
    llm(pair).generate(PROMPT, ask(max_tokens=1), save_cache=path)
    return path


def loaded(path: Path) -> saved.SavedCache:
    return saved.SavedCache(path, MAKER)


# Round trips


PROMPTS = {
    "same": PROMPT,
    "longer": PROMPT + ids(40, seed=1),
    "branches": PROMPT[:80] + ids(60, seed=2),
    "shorter": PROMPT[:60],
    "unrelated": ids(70, seed=3),
    "few": PROMPT[:5],
    "one": PROMPT[:1],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_one_file_serves_every_mode_and_prompt(pair: Path, kept: Path, prompt: str, mode: str) -> None:
    assert_same_text(llm(pair), PROMPTS[prompt], kept, mode, SEEDED)


@pytest.mark.parametrize("mode", MODES)
def test_greedy_too(pair: Path, kept: Path, mode: str) -> None:
    assert_same_text(llm(pair), PROMPT, kept, mode, GREEDY)


def assert_same_text(model: LLM, prompt: list[int], kept: Path, mode: str, sampling: dict[str, Any]) -> None:
    params = ask(**sampling, max_tokens=12)
    fresh = model.generate(prompt, params, mode="ar")[0].outputs[0].token_ids
    assert model.generate(prompt, params, mode=mode, load_cache=kept)[0].outputs[0].token_ids == fresh


@pytest.mark.parametrize(
    ("prompt", "reused"),
    [
        (PROMPT, 150 - 1 - TAIL), (PROMPT + ids(40, seed=1), 149), ([*PROMPT[:80], 1, *ids(60, seed=2)], 80),
        (PROMPT[:60], 59 - TAIL), ([1, *PROMPT[1:]], 0), (PROMPT[:5], 0),
    ],
)  # fmt: skip
def test_only_what_is_new_is_fed(pair: Path, kept: Path, prompt: list[int], reused: int) -> None:
    """The prompt's last token is fed with the first new one, and its last `TAIL` so that pages can be selected."""
    model = llm(pair)
    with counted(model.models.target) as passes:
        model.generate(prompt, ask(max_tokens=1), mode="ar", load_cache=kept)
    assert sum(passes) == len(prompt) - reused


def test_a_batch_and_n_choices_start_from_one_file(pair: Path, kept: Path) -> None:
    model, prompts = llm(pair), [PROMPT, ids(33, seed=4), PROMPT[:100] + ids(9, seed=5)]
    params = ask(n=2, max_tokens=12)
    fresh = [[o.token_ids for o in r.outputs] for r in model.generate(prompts, params, mode="ar")]
    assert [[o.token_ids for o in r.outputs] for r in model.generate(prompts, params, load_cache=kept)] == fresh
    assert fresh[0][0] != fresh[0][1]


def test_prompt_logprobs_do_not_lose_the_part_in_the_file(pair: Path, kept: Path) -> None:
    model, params = llm(pair), ask(prompt_logprobs=0, max_tokens=2)
    fresh, again = (model.generate(PROMPT, params, **how)[0].prompt_logprobs for how in ({}, dict(load_cache=kept)))
    assert fresh is not None and again is not None and len(again) == len(PROMPT)
    pairs = zip(fresh[1:], again[1:], strict=True)
    assert all(a and b and a.chosen.logprob == pytest.approx(b.chosen.logprob, abs=1e-4) for a, b in pairs)


def test_save_and_load_in_one_call(pair: Path, kept: Path, tmp_path: Path) -> None:
    """A conversation goes on: load what there is, save what it has become, over the same file too."""
    longer, path = PROMPT + ids(30, seed=6), tmp_path / "kv"
    shutil.copy(kept, path)
    llm(pair).generate(longer, ask(max_tokens=1), load_cache=path, save_cache=path)
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("ids").tolist() == longer[:-1]
    fresh = llm(pair).generate(longer, ask(), mode="ar")[0].outputs[0].token_ids
    assert llm(pair).generate(longer, ask(), load_cache=path)[0].outputs[0].token_ids == fresh


@pytest.mark.parametrize("length", [1, 2, 17])
def test_short_prompts_can_be_saved(pair: Path, tmp_path: Path, length: int) -> None:
    path = tmp_path / "kv"
    fresh = llm(pair).generate(PROMPT[:length], ask(), save_cache=path)[0].outputs[0].token_ids
    assert llm(pair).generate(PROMPT[:length], ask(), load_cache=path)[0].outputs[0].token_ids == fresh


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fragmented", [False, True])
def test_rows_of_any_shape_and_dtype(tmp_path: Path, dtype: torch.dtype, fragmented: bool) -> None:
    """From a row whose pages lie apart into one whose pages do not, bit for bit, and the other way round."""
    decoder = small_decoder(dtype=dtype)
    full, prompt = Full(make_pool(decoder, 2, 100, fragmented=fragmented)), text(90)
    prefill(decoder, full, 0, text(30, seed=1))
    prefill(decoder, full, 1, prompt[:-1])
    saved.save(tmp_path / "kv", MAKER, full, 1, prompt)
    other = Full(make_pool(decoder, 2, 100, fragmented=not fragmented))
    assert loaded(tmp_path / "kv").restore(other, 1, prompt) == 89 - TAIL
    assert other.lengths_B.tolist() == [0, 89 - TAIL]
    for layer in range(2):
        for a, b in zip(full.pool.span(layer, 1, 0, 89 - TAIL), other.pool.span(layer, 1, 0, 89 - TAIL), strict=True):
            assert torch.equal(a, b)
    if dtype == torch.float32:
        prefill(decoder, other, 1, prompt[:-1])
        assert_holds(other, 1, dense(decoder, prompt[:-1]))


def test_plain_safetensors_reads_it(tmp_path: Path) -> None:
    decoder, prompt = small_decoder(dtype=torch.float32), text(50)
    full = Full(make_pool(decoder, 1, 64))
    prefill(decoder, full, 0, prompt)
    saved.save(tmp_path / "kv", MAKER, full, 0, prompt)
    tensors, truth = load_file(tmp_path / "kv"), dense(decoder, prompt)
    assert set(tensors) == {"ids", "checksum", "keys.0", "keys.1", "values.0", "values.1"}
    assert tensors["ids"].tolist() == prompt
    for layer in range(2):
        for kind, memory in (("keys", truth.keys), ("values", truth.values)):
            torch.testing.assert_close(
                tensors[f"{kind}.{layer}"].double(), memory[layer].transpose(0, 1).cpu(), **CLOSE
            )


# Files that are not to be believed


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    decoder = small_decoder(dtype=torch.float32)
    full = Full(make_pool(decoder, 1, 32))
    prefill(decoder, full, 0, text(20))
    saved.save(tmp_path / "small.kv", MAKER, full, 0, text(20))
    assert len(loaded(tmp_path / "small.kv").ids) == 20
    return tmp_path / "small.kv"


def refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(CacheError) as caught:
        loaded(path)
    assert str(path) in str(caught.value)


def regions(data: bytes) -> dict[str, range]:
    """Where the parts of a safetensors file lie."""
    size = int.from_bytes(data[:8], "little")
    header, start = json.loads(data[8 : 8 + size]), 8 + size
    parts = {"size": range(8), "header": range(8, start)}
    for name, about in header.items():
        if name != "__metadata__":
            parts[name] = range(*(start + offset for offset in about["data_offsets"]))
    assert sum(map(len, parts.values())) == len(data)
    return parts


def test_a_flipped_byte_in_any_region(small_file: Path) -> None:
    """Every byte of the small regions, ends and middle of the large ones, by one bit and by all."""
    data = small_file.read_bytes()
    for where in regions(data).values():
        few = len(where) <= 32
        for at in where if few else {where[0], where[1], where[len(where) // 2], where[-2], where[-1]}:
            for flip in (1, 0x80, 0xFF):
                refused(small_file, data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])


@pytest.mark.parametrize("flip", [1, 0x20])
def test_a_flipped_byte_anywhere_in_the_header(small_file: Path, flip: int) -> None:
    data = small_file.read_bytes()
    for at in regions(data)["header"]:
        refused(small_file, data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_flipped_bit_anywhere(small_file: Path) -> None:
    data = small_file.read_bytes()
    for at in range(len(data)):
        for bit in range(8):
            refused(small_file, data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"U8"', b'"I8"'), (b'"I64"', b'"F64"'), (b'"ids"', b'"idx"'), (b'"checksum"', b'"checksun"'),
        (b'"keys.0"', b'"keys.2"'), (b'"F32"', b'"I32"'), (b"triforce-kv-1", b"triforce-kv-2"),
        (b"__metadata__", b"__netadata__"), (b"fingerprint", b"fingerprins"), (b"[20]", b"[02]"), (b"[32]", b"[31]"),
    ],
)  # fmt: skip
def test_a_header_that_says_something_else(small_file: Path, before: bytes, after: bytes) -> None:
    data = small_file.read_bytes()
    assert before in data
    refused(small_file, data.replace(before, after, 1))


def test_a_truncated_or_longer_file(small_file: Path) -> None:
    data = small_file.read_bytes()
    ends = {0, 1, 7, 8, 9, len(data) // 2, len(data) - 33, len(data) - 32, len(data) - 1}
    for end in ends | {where.start for where in regions(data).values()}:
        refused(small_file, data[:end])
    refused(small_file, data + b"\0")
    refused(small_file, b"\0" + data)


def test_other_files(tmp_path: Path, pair: Path) -> None:
    refused(tmp_path / "empty", b"")
    refused(tmp_path / "text", b"It was the best of times, it was the worst of times, it was the age of wisdom")
    refused(tmp_path / "zeros", bytes(4096))
    refused(tmp_path / "model", (pair / "target" / "model.safetensors").read_bytes())
    for path in (tmp_path, tmp_path / "missing", tmp_path / "text" / "below a file"):
        with pytest.raises(CacheError, match=path.name):
            loaded(path)


def test_another_model_or_dtype(pair: Path, kept: Path, tmp_path: Path) -> None:
    folder = save_model(tiny_model(max_position_embeddings=CONTEXT, rope_theta=5000.0), tmp_path / "other")
    for other in (LLM(folder, None), LLM(pair / "target", None, dtype="float32"), LLM(pair / "draft", None)):
        with pytest.raises(CacheError, match="another model"):
            other.generate(PROMPT, ask(), load_cache=kept)


@pytest.mark.parametrize("other", ["another level", "torch", "a chunk that only torch takes"])
def test_other_kernels(pair: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    """Their bits differ: going on from them would not give the text of a fresh prefill."""
    native = extension.native
    if native is None or len(native.levels()) == 1:
        pytest.skip("there are no other kernels here")
    level, lowest = native.level(), native.levels()[0]
    named = {"another level": lowest, "torch": "torch"}.get(other, f"{level} and torch")
    if other == "torch":
        monkeypatch.setattr(extension, "native", None)
    model = LLM(pair / "target", None, dtype="bfloat16", budget=64, chunk=8 if "chunk" in other else 16)
    if other == "another level":
        native.use(lowest)
    try:
        with pytest.raises(CacheError, match=rf"other kernels \({level}; here {named}\).*TRIFORCE_KERNELS"):
            model.generate(PROMPT, ask(), load_cache=kept)
    finally:
        native.use(level)


def test_a_file_that_does_not_name_its_kernels(small_file: Path) -> None:
    with pytest.raises(CacheError, match="other kernels"):
        saved.SavedCache(small_file, MAKER._replace(kernels="others"))


def test_a_shorter_context_is_the_same_model(pair: Path, kept: Path) -> None:
    """It bounds what may be seen, and changes nothing in what is computed."""
    short = LLM(pair / "target", None, context=300)
    fresh = short.generate(PROMPT, ask(max_tokens=8))[0].outputs[0].token_ids
    assert short.generate(PROMPT, ask(max_tokens=8), load_cache=kept)[0].outputs[0].token_ids == fresh


# Writing


def a_row() -> tuple[Full, list[int]]:
    decoder, prompt = small_decoder(dtype=torch.float32), text(40)
    full = Full(make_pool(decoder, 1, 48))
    prefill(decoder, full, 0, prompt)
    assert max(prompt) < VOCAB
    return full, prompt


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_its_owner_may_read_it(tmp_path: Path, umask: int) -> None:
    """A prompt may be private, whatever the umask, and whoever had a file there before."""
    (tmp_path / "kv").write_text("old")
    (tmp_path / "kv").chmod(0o666)
    before = os.umask(umask)
    try:
        saved.save(tmp_path / "kv", MAKER, *mixed(a_row()))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]


def mixed(row: tuple[Full, list[int]]) -> tuple[Full, int, list[int]]:
    return row[0], 0, row[1]


class Disk:
    """A file that takes `room` bytes and then fails."""

    def __init__(self, file: Any, room: int, failure: BaseException) -> None:
        self.file, self.room, self.failure = file, room, failure

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, data: bytes | memoryview) -> int:
        self.room -= memoryview(data).nbytes
        if self.room < 0:
            raise self.failure
        return int(self.file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def full_disk(patch: pytest.MonkeyPatch, room: int, failure: BaseException) -> None:
    patch.setattr(saved, "open", lambda *args: Disk(open(*args), room, failure), raising=False)  # noqa: SIM115


NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("room", [0, 100, 2000, 10_000])
@pytest.mark.parametrize(
    "failure", [NO_SPACE, OSError(errno.EIO, "broken"), KeyboardInterrupt(), MemoryError()], ids=repr
)
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, failure: BaseException
) -> None:
    path, (full, prompt) = tmp_path / "kv", a_row()
    saved.save(path, MAKER, full, 0, prompt[:20])
    old = path.read_bytes()
    full_disk(monkeypatch, room, failure)
    with pytest.raises(CacheError if isinstance(failure, OSError) else type(failure)) as caught:
        saved.save(path, MAKER, full, 0, prompt)
    if failure is NO_SPACE:
        assert "No space left" in str(caught.value) and str(path) in str(caught.value)
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["kv"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_at_the_last_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object) -> None:
        raise NO_SPACE

    full, prompt = a_row()
    (tmp_path / "kv").write_text("old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(CacheError):
        saved.save(tmp_path / "kv", MAKER, full, 0, prompt)
    assert (tmp_path / "kv").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["kv"]


def test_a_path_that_cannot_be_written(pair: Path, tmp_path: Path) -> None:
    """Said before the prompt is read, and by `save` itself."""
    full, prompt = a_row()
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "missing" / "kv", tmp_path / "file" / "kv"):
        with pytest.raises(CacheError, match=path.name):
            saved.save(path, MAKER, full, 0, prompt)
        model = llm(pair)
        with counted(model.models.target) as passes, pytest.raises(CacheError, match="cannot write"):
            model.generate(PROMPT, ask(), save_cache=path)
        assert not passes
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_asking_whether_a_path_can_be_written_leaves_no_trace(tmp_path: Path) -> None:
    saved.require_writable(tmp_path / "kv")
    assert not list(tmp_path.iterdir())


def test_unverified_tokens_never_leave(tmp_path: Path) -> None:
    """Only committed tokens are saved, even if a longer text is named."""
    full, prompt = a_row()
    full.rewind(torch.tensor([25], device=full.pool.device))
    saved.save(tmp_path / "kv", MAKER, full, 0, prompt)
    assert loaded(tmp_path / "kv").ids == prompt[:25]

"""Offloaded KV: the text equals that of KV in memory bit for bit, and a fault fails its own request only."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_checkpoint import save, tiny_model
from tests.helpers.tiny_llm import ask, ids
from triforce.backends import dispatch
from triforce.errors import CacheError, RequestError
from triforce.interface.outputs import KVMemoryUsage, RequestOutput
from triforce.interface.quantities import size_of
from triforce.llm import LLM

pytestmark = pytest.mark.skipif(dispatch.native is None, reason="a store is for the native kernels")

LONG = 2404
PROMPT = ids(LONG)
MEMORY = "4750KiB"
SHAPE = dict(hidden_size=32, intermediate_size=32, head_dim=64, num_attention_heads=4, num_key_value_heads=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a pair. The KV of the prompt is three times as large as MEMORY."""
    folder = tmp_path_factory.mktemp("large")
    for name, layers in (("target", 6), ("draft", 1)):
        save(tiny_model(max_position_embeddings=LONG + 200, num_hidden_layers=layers, **SHAPE), folder / name)
    return folder


@cache
def llm(folder: Path, kind: str = "none", memory: str = "auto", **how: Any) -> LLM:
    settings = dict(retrieval_budget=256, speculative_tokens=4, searched_layers="none") | how
    return LLM(folder / "target", folder / "draft", kv_offload=kind, kv_memory=memory, **settings)


def offloaded(folder: Path, kind: str = "file", **how: Any) -> LLM:
    return llm(folder, kind, MEMORY, **how)


def answer(model: LLM, prompt: list[int] = PROMPT, mode: str = "ar", **changes: Any) -> RequestOutput:
    return model.generate(prompt, ask(max_tokens=12, **changes), mode=mode)[0]


def tokens(model: LLM, *args: Any, **changes: Any) -> list[int]:
    return answer(model, *args, **changes).outputs[0].token_ids


@pytest.mark.parametrize(("temperature", "kind"), [(0.0, "host"), (0.8, "file")])
@pytest.mark.parametrize("mode", ["ar", "triforce", "retrieval", "auto"])
def test_offloaded_text_equals_memory(folder: Path, mode: str, temperature: float, kind: str) -> None:
    output = answer(offloaded(folder, kind), mode=mode, temperature=temperature)
    assert output.outputs[0].token_ids == tokens(llm(folder), temperature=temperature)
    assert output.exactness == "bitwise"
    kv_bytes = 2 * 6 * 4 * 64 * 2 * LONG
    assert kv_bytes > 3 * size_of(MEMORY) * 0.98
    assert output.kv.device_bytes <= size_of(MEMORY)
    assert (output.kv.file_bytes if kind == "file" else output.kv.host_bytes) >= kv_bytes


@pytest.mark.parametrize(("temperature", "kind"), [(0.0, "file"), (0.8, "host")])
@pytest.mark.parametrize("mode", ["ar", "triforce"])
def test_offloaded_int8_kv_text_equals_memory(folder: Path, mode: str, temperature: float, kind: str) -> None:
    """Int8 KV has half of the bytes and gets less memory, too."""
    output = answer(llm(folder, kind, "3500KiB", kv_dtype="int8"), mode=mode, temperature=temperature)
    assert output.outputs[0].token_ids == tokens(llm(folder, kv_dtype="int8"), temperature=temperature)
    kv_bytes = 6 * 4 * (2 * 64 + 4) * LONG
    assert kv_bytes > 2 * size_of("3500KiB") * 0.98
    assert kv_bytes <= (output.kv.file_bytes if kind == "file" else output.kv.host_bytes) < 1.1 * kv_bytes


def memory_of(engine: Any) -> Any:
    return engine.core.store.pool.kv


def outcomes(engine: Any) -> dict[Any, Any]:
    """Run to the end; return the output or the error of each request."""
    events = {}
    while engine.busy:
        events |= {request: event for request, event in engine.step() if isinstance(event, Exception | RequestOutput)}
    return events


def two_requests(model: LLM) -> tuple[Any, Any, Any]:
    """Return an engine, a request that decodes plainly, and one of another mode that waits for it."""
    engine = model.open(2, 2 * LONG + 400, max_itl=3600.0)  # a step prefills all of a prompt, at any load
    first_request = model.request(PROMPT, ask(max_tokens=12), "ar")
    second = model.request(PROMPT[:-1], ask(max_tokens=12), "retrieval")
    engine.submit([first_request])
    while not first_request.sequences[0].tokens:
        engine.step()
    return engine, first_request, second


def test_read_error_fails_rows_of_its_pass(folder: Path) -> None:
    engine, first_request, second = two_requests(llm(folder, "file", "8MiB"))
    store = memory_of(engine).offload_layout.store
    good = os.dup(store.direct)
    with open(os.devnull, "wb") as unreadable:
        os.dup2(unreadable.fileno(), store.direct)
        error = outcomes(engine)[first_request]
    assert isinstance(error, CacheError) and "cannot be read back" in str(error) and "TMPDIR" in str(error)
    os.dup2(good, store.direct)
    os.close(good)
    engine.submit([second])
    assert outcomes(engine)[second].outputs[0].token_ids == tokens(llm(folder), PROMPT[:-1])


def test_truncated_file_raises_cache_error(folder: Path) -> None:
    engine, first_request, second = two_requests(llm(folder, "file", "8MiB"))
    os.ftruncate(memory_of(engine).offload_layout.store.file, 1 << 20)
    error = outcomes(engine)[first_request]
    assert isinstance(error, CacheError) and "its file was cut" in str(error)
    engine.submit([second])  # it writes all that it prefills
    assert outcomes(engine)[second].outputs[0].token_ids == tokens(llm(folder), PROMPT[:-1])


def test_full_disk_fails_one_request(folder: Path) -> None:
    model = llm(folder, "file", "8MiB")
    engine, first_request, _ = two_requests(model)
    second = model.request(ids(LONG, seed=1), ask(max_tokens=12), "retrieval")
    store = memory_of(engine).offload_layout.store
    good = os.dup(store.file)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), store.file)
        engine.submit([second])
        error = next(event for request, event in engine.step() if request is second)
    os.dup2(good, store.file)
    os.close(good)
    assert isinstance(error, CacheError) and "No space left" in str(error) and "TMPDIR" in str(error)
    assert outcomes(engine)[first_request].outputs[0].token_ids == tokens(llm(folder))


def test_file_is_private_and_removed(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    engine = llm(folder, "file", "8MiB").open(1, LONG + 200)
    store = memory_of(engine).offload_layout.store
    assert list(tmp_path.iterdir()) == []
    assert os.readlink(f"/proc/self/fd/{store.file}").startswith(str(tmp_path))
    assert os.fstat(store.file).st_mode & 0o777 == 0o600
    assert os.fstat(store.file).st_nlink == 0
    file = store.file
    del engine, store
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def count_pages(folder: Path) -> tuple[int, int, int]:
    """Return the counts of pages that were streamed ahead, fetched on demand, and made resident while streamed."""
    model = llm(folder, "file", "6MiB", kv_resident_layers=0)
    engine = model.open(1, LONG + 200)
    request = model.request(PROMPT, ask(max_tokens=24), "retrieval")
    engine.submit([request])
    outcomes(engine)
    page_counts: tuple[int, int, int] = memory_of(engine).native_offload.page_counts
    return page_counts


def test_streamed_selected_pages_stay_resident(folder: Path) -> None:
    streamed, fetched, resident_pages = count_pages(folder)
    assert streamed > 5 * 24 * (LONG // 16) * 0.9 and resident_pages > 0
    assert fetched < streamed / 100


@pytest.mark.parametrize("selection", ["mean_key", "quest"])
def test_key_selections_of_offloaded_pages_equal_memory(folder: Path, selection: str) -> None:
    expected_ids = tokens(llm(folder, retrieval_policy=selection), mode="retrieval")
    assert tokens(llm(folder, "host", "6MiB", retrieval_policy=selection), mode="retrieval") == expected_ids


def test_offload_with_searched_layers_and_batches_keeps_texts(folder: Path) -> None:
    prompts = [PROMPT[:1500], PROMPT[:1500], PROMPT[100:1300]]
    how: dict[str, Any] = dict(searched_layers="1,3")
    expected_outputs = llm(folder, **how).generate(prompts, ask(max_tokens=12, n=2), mode="triforce")
    offloaded_outputs = llm(folder, "host", "12MiB", **how).generate(prompts, ask(max_tokens=12, n=2), mode="triforce")
    texts = [
        [[c.token_ids for c in output.outputs] for output in outputs]
        for outputs in (expected_outputs, offloaded_outputs)
    ]
    assert texts[0] == texts[1]


def test_saved_prompts_load_with_and_without_offload(folder: Path, tmp_path: Path) -> None:
    expected_ids = tokens(llm(folder))
    models = {"plain": llm(folder), "offloaded": offloaded(folder)}
    for name, model in models.items():
        model.generate(PROMPT, ask(max_tokens=1), mode="ar", save_cache=tmp_path / name)
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "offloaded").read_bytes()
    for model in models.values():
        (loaded_output,) = model.generate(PROMPT, ask(max_tokens=12), mode="ar", load_cache=tmp_path / "offloaded")
        assert loaded_output.outputs[0].token_ids == expected_ids


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (dict(kv_memory="100KiB"), "give [0-9]+MiB or more"),
        (dict(kv_memory=MEMORY, kv_resident_layers=6), "smaller kv_resident_layers"),
    ],
)
def test_too_little_memory_reports_minimum(folder: Path, how: dict[str, Any], says: str) -> None:
    with pytest.raises(CacheError, match=says):
        tokens(llm(folder, "host", how["kv_memory"], **{k: v for k, v in how.items() if k != "kv_memory"}))


@pytest.mark.parametrize(
    "how",
    [
        dict(kv_offload="disk"), dict(kv_memory="1GiB"), dict(kv_resident_layers=2),
        dict(kv_offload="file", kv_memory="lots"),
        dict(kv_offload="file", kv_resident_layers="all"), dict(kv_offload="file", lower_tiers="int8"),
        dict(kv_offload="file", retrieval_chunk=8),
    ],
)  # fmt: skip
def test_contradictory_offload_settings_raise(folder: Path, how: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"kv_"):
        LLM(folder / "target", None, **how)


def test_memory_report_without_offload_counts_device_bytes(folder: Path) -> None:
    kv_usage = answer(llm(folder), PROMPT[:100]).kv
    assert kv_usage.device_bytes >= 2 * 6 * 4 * 64 * 2 * 100 and kv_usage == KVMemoryUsage(kv_usage.device_bytes)


def test_changed_file_changes_text(folder: Path) -> None:
    """Control of the tests above: KV is read from the file."""
    engine, first_request, _ = two_requests(llm(folder, "file", "8MiB", kv_resident_layers=0))
    store = memory_of(engine).offload_layout.store
    os.pwrite(store.file, bytes(store.bytes), 0)
    assert outcomes(engine)[first_request].outputs[0].token_ids != tokens(llm(folder))


def test_pages_without_residency_are_read_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the residency test."""
    monkeypatch.setattr(
        "triforce.kvcache.views.full.FullView.budget", property(lambda _: None, lambda *_: None), raising=False
    )
    streamed, fetched, resident_pages = count_pages(folder)
    assert resident_pages == 0 and fetched > streamed / 100

"""The end of an LLM: `close`, `with`, copies that are refused, and processes that are forked."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import disk_llm
from tests.helpers.tiny_checkpoint import tiny_pair
from triforce.errors import RequestError
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.session import Session

PROMPT = "the cat sat on the mat"
LONG = SamplingParams(seed=3, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(seed=3, max_tokens=4, ignore_eos=True)
CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate(PROMPT, SHORT),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "x"}]),
    "stream": lambda llm: next(llm.stream(PROMPT)),
    "encode": lambda llm: llm.encode(PROMPT),
    "sampling_params": lambda llm: llm.sampling_params(),
    "modes": lambda llm: llm.modes,
    "open": lambda llm: llm.open(),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
    "with": lambda llm: llm.__enter__(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with a target and a draft of one tokenizer."""
    return tiny_pair(tmp_path_factory.mktemp("texts"), positions=640)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder / "target", folder / "draft", retrieval_budget=64) as llm:
        yield llm


@pytest.mark.parametrize("call", CALLS)
def test_closed_llm_calls_raise_one_line(call: str, llm: LLM) -> None:
    llm.close()
    llm.close()
    with pytest.raises(RequestError, match=r"^this LLM is closed; make another LLM$"):
        CALLS[call](llm)


def test_llm_closed_while_streaming_ends_stream(llm: LLM) -> None:
    pieces = llm.stream(PROMPT, LONG)
    next(pieces)
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        list(pieces)


def test_llm_closed_ends_session(llm: LLM) -> None:
    session = Session(llm)
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        next(session.ask(PROMPT, SHORT))


def test_llm_closed_has_written_disk_cache(disk_pair: Path, cache: Path) -> None:
    for cached in (0, disk_llm.WHOLE):
        with disk_llm.started(disk_pair, cache) as llm:
            (output,) = llm.generate(disk_llm.PROMPT, SHORT)
        assert output.cached_tokens == cached


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_llm_copies_raise_type_error(way: Callable[[LLM], object], llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"make another LLM$"):
        way(llm)


def test_llm_misspelt_attribute_raises_attribute_error(llm: LLM) -> None:
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'generat'"):
        llm.generat  # type: ignore[attr-defined]  # noqa: B018


def test_closed_llm_has_no_attribute_that_it_never_had(llm: LLM) -> None:
    llm.close()
    assert not hasattr(llm, "generat") and getattr(llm, "words", None) is None
    for name in ("tokenizer", "engines"):
        with pytest.raises(RequestError, match="closed"):
            getattr(llm, name)


def test_llm_files_in_home_folder_are_found(llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths of saved prompts, the disk cache and models begin with `~`."""
    monkeypatch.setenv("HOME", str(folder))
    llm.generate(PROMPT, SHORT, save_cache="~/saved.kv")
    assert (folder / "saved.kv").is_file()
    assert llm.generate(PROMPT, SHORT, load_cache=Path("~/saved.kv"))
    with LLM("~/target", "~/draft", disk_cache="~/kept"):
        assert (folder / "kept").is_dir()


def test_llm_forked_while_generating_raises_in_child(folder: Path, tmp_path: Path) -> None:
    """An LLM that the child creates itself gives the same text. The parent's LLM goes on."""
    llm = LLM(folder / "target", None, disk_cache=tmp_path / "cache")
    expected_ids = llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
    pieces = llm.stream(PROMPT, LONG)
    next(pieces)
    working = threading.Event()
    worker = threading.Thread(target=llm.generate, args=(PROMPT, LONG), kwargs={"on_prefill": lambda *_: working.set()})
    worker.start()
    assert working.wait(60)
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, _in_child(llm, folder).encode())
        os._exit(0)
    os.close(write)
    worker.join()
    with os.fdopen(read) as child_output:
        assert child_output.read() == f"3 of 3 refused, {expected_ids}"
    assert os.waitpid(child, 0)[1] == 0 and len(list(pieces)) > 1


def _in_child(llm: LLM, folder: Path) -> str:
    refused = 0
    for call in ("generate", "encode", "open"):
        try:
            CALLS[call](llm)
        except RequestError as error:
            refused += "make another LLM in this process" in str(error) and "spawn" in str(error)
    child_ids = LLM(folder / "target", None).generate(PROMPT, SHORT)[0].outputs[0].token_ids
    return f"{refused} of 3 refused, {child_ids}"

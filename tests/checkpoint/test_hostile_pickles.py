"""Pickles of strangers: what are no weights in them, and what they ask of their reader, which tries each first."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.forked_trial import forked
from tests.helpers.fuzz_kinds import pickle_weights
from tests.helpers.fuzz_kinds.config_json import copied
from tests.helpers.one_line import said_of
from triforce.checkpoint import passed_trials, weight_files
from triforce.checkpoint.hub import SHIPPED
from triforce.checkpoint.weight_files import open_archives
from triforce.engine.model_loader import load
from triforce.errors import ModelError

ESCAPES = "a\nb\x1b[2J\u202e"


def pickled(folder: Path, state: Any) -> Path:
    """A folder with such a pickle in the place of its weights."""
    weights = copied("llama-biases", folder) / "model.safetensors"
    tensors = load_file(weights)
    weights.unlink()
    torch.save(state(tensors), folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


Q = "model.layers.0.self_attn.q_proj.weight"
PICKLES: dict[str, tuple[Callable[[dict[Any, Any]], Any], str]] = {
    "a number for a name": (lambda state: state | {7: state[Q]}, "has '7' for a tensor's name, which is no text"),
    "mixed names": (lambda state: {None: state[Q], ("a", 1): state[Q]}, "which is no text"),
    "escapes in a name": (lambda state: state | {ESCAPES: state[Q]}, r"tensor a\nb\x1b[2J\u202e"),
    "sparse": (
        lambda state: state | {Q: state[Q].to_sparse()},
        f"tensor {Q} is no plain tensor of numbers (sparse_coo",
    ),
    "meta": (lambda state: state | {Q: state[Q].to("meta")}, "is no plain tensor of numbers (strided on meta)"),
    "expanded": (lambda state: state | {Q: torch.ones(1).expand(1 << 20, 1 << 20)}, "more numbers than the file"),
    "the same often": (
        lambda state: {f"{n}": torch.ones(1 << 16) for n in range(1)} | dict.fromkeys(map(str, range(9)), BLOCK),
        "twice the bytes",
    ),
}
BLOCK = torch.ones(1 << 16)


@pytest.mark.parametrize("case", PICKLES)
def test_pickle_of_what_are_no_weights_is_one_line(case: str, tmp_path: Path) -> None:
    make, said = PICKLES[case]
    pickled(tmp_path, make)
    assert said in said_of(tmp_path, pickle_weights.open_case)


def replace_program(file: Path, program: bytes) -> None:
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, program if name.endswith("data.pkl") else data)


def test_pickle_that_asks_for_memory_is_refused_by_its_trial(tmp_path: Path) -> None:
    """The trial process refuses 64 GiB; a reader that fills them would take all of it."""
    file = pickled(tmp_path, lambda state: state)
    replace_program(file, b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R.")
    with pytest.raises(ModelError, match=r"pytorch_model.bin takes more memory than a file .*safetensors"):
        open_archives(tmp_path)


def test_pickle_that_keeps_its_reader_busy_is_refused_by_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "SECONDS", 1)
    monkeypatch.setattr(passed_trials, "run_trial", forked)
    monkeypatch.setattr("torch.load", busy)
    pickled(tmp_path, lambda state: state)
    with pytest.raises(
        ModelError, match=r"the weights are not opened: it takes more than 1 s or 10\d\d MiB.*safetensors"
    ):
        open_archives(tmp_path)


def busy(*_: object, **__: object) -> None:
    while True:
        pass


def test_pickle_that_passed_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trials = list[Any]()
    monkeypatch.setattr(passed_trials, "run_trial", lambda *given: trials.append(given) or forked(*given))
    file = pickled(tmp_path / "model", lambda state: state)
    for _ in range(2):
        open_archives(file.parent)
    assert len(trials) == 1
    torch.save(torch.load(file) | {"more": torch.ones(1)}, file)
    open_archives(file.parent)
    assert len(trials) == 2


def test_shipped_pair_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(*given: object) -> None:
        raise AssertionError("a trial takes a second")

    monkeypatch.setattr(passed_trials, "run_trial", tried)
    monkeypatch.setattr("subprocess.Popen", tried)
    for folder in SHIPPED:
        load(folder, device="cpu")

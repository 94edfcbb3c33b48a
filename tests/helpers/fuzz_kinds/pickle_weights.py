"""Cases of pickled weights: dictionaries with foreign values, and damaged pickles and archives."""

from __future__ import annotations

import pickle
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.forked_trial import forked
from tests.helpers.fuzz_kinds.config_json import ASKED, generated, whole
from tests.helpers.hostile_values import hostile_value
from triforce.checkpoint import passed_trials

KEYS: list[Any] = [1, None, b"a", ("a", 1), True, "\n", "\x1b[2J", "a" * 100_000, 1.5, frozenset([1])]
OPCODES = [
    code
    for code in map(
        ord, "(.0123456789abcdeghijlmnopqrstuxy]}\x80\x85\x86\x87\x88\x89\x8a\x8b\x93\x94\x95)NMIFKLJRSTQUVXBC"
    )
]


@cache
def tensors() -> dict[str, torch.Tensor]:
    return load_file(whole("llama-biases") / "model.safetensors")


def strange_tensors(random: Random, tensor: torch.Tensor) -> Any:
    """Return strange values in place of a tensor."""
    makers: list[Callable[[], Any]] = [
        lambda: tensor.to_sparse(), lambda: tensor.to("meta"), lambda: torch.nn.Parameter(tensor),
        lambda: torch.empty(1).expand(1 << 20, 1 << 20), lambda: torch.empty(1).expand(*tensor.shape),
        lambda: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8), lambda: tensor.to(torch.complex64),
        lambda: tensor.to(torch.float8_e4m3fn), lambda: tensor.T, lambda: tensor[:0], lambda: torch.tensor(1.0),
        lambda: torch.sparse_coo_tensor([[0], [0]], [1.0], (1 << 30, 1 << 30)), lambda: hostile_value(random),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), lambda: tensor.to(torch.int32),
        lambda: torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1 << 40)), lambda: {"deep": tensor},
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested and quantised tensors prototypes
        return random.choice(makers)()


def begin(folder: Path) -> Path:
    """Write all files but weights; return the path for these."""
    for file in whole("llama-biases").iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder / "pytorch_model.bin"


WHOLES: list[Callable[[Path], object]] = [lambda folder: torch.save(tensors(), begin(folder))]


@contextmanager
def deep_pickles() -> Iterator[None]:
    """Allow pickling of values as deep as those of `hostile_value`."""
    previous_limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    yield
    sys.setrecursionlimit(previous_limit)


def make_case(random: Random, folder: Path) -> None:
    file = begin(folder)
    state: dict[Any, Any] = dict(tensors())
    name = random.choice(list(state))
    match random.randrange(7):
        case 0:
            state[random.choice(KEYS)] = state.pop(name) if random.random() < 0.5 else state[name]
        case 1 | 2:
            state[name] = strange_tensors(random, state[name])
        case 3:
            state = random.choice([OrderedDict(state), [*state.values()], {"state_dict": state}, set(state), 7])  # type: ignore[assignment]
    with deep_pickles():
        torch.save(state, file, _use_new_zipfile_serialization=random.random() > 0.03)
    match random.randrange(4):
        case 0:
            spoil_program(random, file)
        case 1:
            spoil_bytes(random, file)


def spoil_program(random: Random, file: Path) -> None:
    """Change the pickle in an archive: some opcodes, or all for one that demands much."""
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    (place,) = (name for name in members if name.endswith("data.pkl"))
    program = bytearray(members[place])
    match random.randrange(4):
        case 0:
            for _ in range(random.choice([1, 3, 20])):
                program[random.randrange(len(program))] = random.choice(OPCODES)
        case 1:
            del program[random.randrange(len(program)) :]
        case 2:
            program = bytearray(random.choice(demanding()))
        case 3:
            with deep_pickles():
                program = bytearray(pickle.dumps(hostile_value(random), protocol=2))
    members[place] = bytes(program)
    deflated = zipfile.ZIP_DEFLATED if random.random() < 0.3 else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", deflated) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


@cache
def demanding() -> list[bytes]:
    """Yield pickles that make their reader take memory or time, or recurse deeply."""
    return [
        b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R.",
        b"\x80\x02c__builtin__\nbytearray\n\x8a\x04\x00\x00\x00\x70\x85R.",
        b"\x80\x02" + b"(" * 1_000_000 + b"t" * 1_000_000 + b".",
        b"\x80\x02" + b"]" + b"2a" * 10 + b".",
        b"\x80\x02X\x04\x00\x00\x00aaaa" + b"2\x86" * 100_000 + b".",
        b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".",
        b"\x80\x02B\xff\xff\xff\x7f" + b"a" * 10 + b".",
        b"\x80\x02ccollections\nCounter\n(X\x01\x00\x00\x00a" + b"2" * 200_000 + b"l\x85R.",
        b"\x80\x02}(" + b"".join(b"J" + i.to_bytes(4, "little") + b"N" for i in range(200_000)) + b"u.",
        b"a" * 20_000_000,
    ]  # fmt: skip


def spoil_bytes(random: Random, file: Path) -> None:
    """Cut a file, or change some of its bytes."""
    data = bytearray(file.read_bytes())
    if random.random() < 0.3:
        del data[random.randrange(len(data)) :]
    else:
        for _ in range(random.choice([1, 5, 50])):
            at = random.randrange(len(data)) if random.random() < 0.3 else -1 - random.randrange(min(4000, len(data)))
            data[at] = random.randrange(256)
    file.write_bytes(data)


def open_case(folder: Path) -> int:
    """Generate a text. The trial is a fork of this process, which has the imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passed_trials, "run_trial", forked)
        return generated([str(folder), "--draft", "none", "--mode", "ar", *ASKED])

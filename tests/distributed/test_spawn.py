"""Ranks as their environment names them: where they meet, their devices, and what they import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from triforce import installed
from triforce.distributed import spawn
from triforce.errors import RankError, RequestError

TORCHRUN = {"MASTER_ADDR": "node.example", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("changes", "url"),
    [
        ({}, "tcp://node.example:29500"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, "tcp://node.example:29501"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, "tcp://node.example:29500"),
        ({"LOCAL_WORLD_SIZE": "4"}, "tcp://127.0.0.1:29500"),
        ({"MASTER_ADDR": "fd00::7"}, "tcp://[fd00::7]:29500"),
        ({spawn.MEETING: "file:///there/meeting"}, "file:///there/meeting"),
    ],
)
def test_ranks_of_torchrun_meet_at_its_address(
    changes: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    for name, value in (TORCHRUN | {"RANK": "3"} | changes).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("triforce.distributed.socket_group.SocketGroup", lambda *arguments: seen.append(arguments))
    spawn.join(4, "cpu", True)
    assert seen == [(3, 4, url, True)]


def test_missing_variable_of_torchrun_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (TORCHRUN | {"RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(RankError, match="MASTER_ADDR and MASTER_PORT"):
        spawn.join(4, "cpu", True)


SOURCE = Path(__file__).parents[2] / "src"
IMPORTS = """
import sys
sys.path.insert(0, {source!r})
from triforce.distributed import spawn
assert "numpy" not in sys.modules, "the process that starts ranks needs no arrays"
import numpy as np
from triforce.distributed.socket_group import SocketGroup
group = SocketGroup(0, 1, "file:///nowhere/meeting")
group.gather(np.ones((1, 4), np.float32), 4)
group.add(np.ones((1, 4), np.uint16))
group.broadcast({{"a": [1]}})
{device}
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


@pytest.mark.parametrize(
    "device",
    [
        "assert spawn.own_device('cpu', 1) == 'cpu'",
        "spawn.has_cuda = lambda: False; assert spawn.own_device('auto', 1) == 'cpu'",
    ],
)
def test_rank_without_gpu_imports_no_torch(device: str) -> None:
    code = IMPORTS.format(source=str(SOURCE), device=device)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("found", "file", "available", "expected"),
    [(True, "null", True, True), (True, "null", False, False), (True, "no", True, False), (False, "null", True, False)],
)
def test_cuda_needs_driver_torch_and_device(
    found: bool, file: str, available: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "GPU_DEVICE_FILES", ("no-such-device", file))
    monkeypatch.setattr(installed, "find_spec", lambda name: object() if found and name == "torch" else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert installed.has_cuda() is expected


@pytest.mark.parametrize(
    ("device", "available", "own"),
    [("auto", True, "cuda:3"), ("auto", False, "cpu"), ("cuda", True, "cuda:3"), ("cpu", True, "cpu")],
)
def test_rank_has_device_of_its_number(device: str, available: bool, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(spawn, "has_cuda", lambda: available)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert spawn.own_device(device, 3) == own
    assert current == ([3] if own == "cuda:3" else [])


def test_one_gpu_for_all_ranks_is_refused() -> None:
    with pytest.raises(RequestError, match="--device cuda:1 is one device"):
        spawn.own_device("cuda:1", 0)

"""The choice of kernels, and the errors where they cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from triforce.backends import dispatch
from triforce.backends import dispatch as backends_dispatch
from triforce.bench import shapes
from triforce.errors import TriforceError

SOURCE = str(Path(backends_dispatch.__file__).parents[2])  # of the package under test
built = pytest.mark.skipif(backends_dispatch.native is None, reason="the native kernels were not built")


LEVELS = """
import importlib, os, sys
from triforce.backends import dispatch
for name in sys.argv[1:]:
    os.environ["TRIFORCE_KERNELS"] = name
    importlib.reload(dispatch)
    print(dispatch.native and dispatch.native.level())
"""


def levels_for(kernels: list[str]) -> list[str]:
    """Return the levels in use after one start of Python with an empty variable, and then with each of these values."""
    environment = os.environ | {"PYTHONPATH": SOURCE, "TRIFORCE_KERNELS": ""}
    command = [sys.executable, "-c", LEVELS, "", *kernels]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


@built
def test_environment_variable_selects_level() -> None:
    levels = backends_dispatch.native.levels()
    assert levels[0] == "portable"
    assert levels_for([*levels, "torch"]) == [levels[-1], *levels, "None"]


@built
def test_unavailable_levels_raise() -> None:
    default_level = backends_dispatch.native.level()
    with pytest.raises(
        TriforceError, match=r"TRIFORCE_KERNELS=sse9: sse9 is not among .*portable.* There are also torch and triton"
    ):
        backends_dispatch.load("sse9")
    with pytest.raises(ValueError, match="sse9"):
        backends_dispatch.native.use("sse9")
    assert backends_dispatch.native.level() == default_level


def test_missing_extension_falls_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("triforce.backends.cpu._native", raising=False)
    monkeypatch.setitem(sys.modules, "triforce.backends.cpu._native", None)
    native, missing = backends_dispatch.load("")
    assert native is None
    assert "compiler" in missing
    with pytest.raises(TriforceError, match="TRIFORCE_KERNELS=avx2 asks for native kernels, but they were not built"):
        backends_dispatch.load("avx2")
    assert backends_dispatch.load("torch") == (None, "")


CPU, CUDA = "cpu", "cuda"


@pytest.mark.parametrize(
    ("requested", "device", "used"),
    [("", CPU, False), ("", CUDA, True), ("torch", CUDA, False), ("avx2", CUDA, False), ("triton", CUDA, True)],
)
def test_triton_is_selected_on_cuda(requested: str, device: str, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends_dispatch, "_installed", lambda: True)
    assert backends_dispatch.suits_triton(requested, device) is used
    assert backends_dispatch.load("triton") == (None, "")


def test_triton_on_cpu_needs_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends_dispatch, "_installed", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backends_dispatch.suits_triton("triton", CPU)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(TriforceError, match=r"TRIFORCE_KERNELS=triton.*CUDA.*this is cpu.*TRITON_INTERPRET=1"):
        backends_dispatch.suits_triton("triton", CPU)


def test_missing_triton_falls_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch path replaces Triton, unless Triton is requested by name."""
    monkeypatch.setattr(backends_dispatch, "_installed", lambda: False)
    assert not backends_dispatch.suits_triton("", CUDA)
    with pytest.raises(TriforceError, match=r"not installed; pip install 'triforce\[gpu\]'"):
        backends_dispatch.suits_triton("triton", CUDA)


def test_torch_takes_no_more_threads_than_usable_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends_dispatch, "native", None)
    monkeypatch.setattr(backends_dispatch, "usable_cpus", lambda: 2)
    default_threads = torch.get_num_threads()
    try:
        for set_threads, limited_threads in ((3, 2), (2, 2), (1, 1)):
            torch.set_num_threads(set_threads)
            dispatch.claim_threads(shapes.config_of("30m-draft", 64), "float32", "cpu")
            assert torch.get_num_threads() == limited_threads
    finally:
        torch.set_num_threads(default_threads)

"""The thread pool: the same bits however many threads and callers, through a fork, and beside another process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.paged_kv import native
from triforce.backends import native_loader

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)

SOURCE = str(Path(native_loader.__file__).parents[2])  # of the package under test
WORK = """
import os, torch
from triforce.backends.cpu import _native as native
torch.manual_seed(0)
matrix, x, y = native.Matrix(torch.randn(512, 512)), torch.randn(8, 512), torch.empty(8, 512)
def work(times):
    for _ in range(times):
        matrix.linear(x, y)
    return y.double().sum().item()
"""
FORK = """
import sys
wanted = work(1)
read, write = os.pipe()
if not os.fork():
    os.write(write, repr(work(100)).encode())
    os._exit(0)
os.close(write)
assert work(100) == wanted
assert float(os.read(read, 100)) == wanted
"""


@pytest.fixture(autouse=True)
def threads() -> Iterator[int]:
    before = native.threads()
    yield before
    native.set_threads(before)


def start(code: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", WORK + code], env=environment, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=1000)  # under sanitizers; elsewhere pytest has less patience
    assert process.returncode == 0, errors


def test_as_many_as_this_process_may_use(threads: int) -> None:
    if hasattr(os, "sched_getaffinity"):
        assert threads == len(os.sched_getaffinity(0))
    native.set_threads(3)
    assert native.threads() == 3
    with pytest.raises(ValueError, match="at least 1"):
        native.set_threads(0)


def test_any_number_of_threads_and_callers() -> None:
    matrix, x = native.Matrix(torch.randn(1000, 300)), torch.randn(20, 300)
    wanted = torch.empty(20, 1000)
    matrix.linear(x, wanted)
    results: list[torch.Tensor] = []

    def call() -> None:
        for _ in range(50):
            y = torch.empty(20, 1000)
            matrix.linear(x, y)
            results.append(y)

    for count in (1, 2, 7):
        native.set_threads(count)
        callers = [threading.Thread(target=call) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert len(results) == 3 * 3 * 50
    assert all(torch.equal(wanted, y) for y in results)


def test_their_number_may_change_between_the_jobs_of_others() -> None:
    matrix, x, wanted = native.Matrix(torch.randn(1000, 300)), torch.randn(20, 300), torch.empty(20, 1000)
    matrix.linear(x, wanted)
    results = [torch.empty(20, 1000) for _ in range(40)]
    caller = threading.Thread(target=lambda: [matrix.linear(x, y) for y in results])
    caller.start()
    while caller.is_alive():
        for count in (1, 3, 2):
            native.set_threads(count)
            assert native.threads() == count
    caller.join()
    assert all(torch.equal(wanted, y) for y in results)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_makes_its_own() -> None:
    finish(start(FORK))


def test_two_processes_share_the_machine() -> None:
    """Each job waits for the one chunk that a descheduled worker holds, not for a time slice per thread."""
    both = [start("work(1000)") for _ in range(2)]
    for process in both:
        finish(process)

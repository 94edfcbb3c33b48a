"""The thread pool: bits do not depend on threads, callers, a fork, or another process beside it."""

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
from triforce.backends import dispatch

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)

SOURCE = str(Path(dispatch.__file__).parents[2])  # of the package under test
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

MANY = """
native.set_threads(1)
work(1)
before = len(os.listdir("/proc/self/task"))
native.set_threads(native.usable_cpus() + 40)
wanted = work(1)
assert len(os.listdir("/proc/self/task")) == before + native.usable_cpus() - 1
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
assert native.usable_cpus() == 1
native.set_threads(2)
assert work(10) == wanted and len(os.listdir("/proc/self/task")) == before
"""
CROWDED = """
import time
native.set_threads(2)
wanted = work(1)
one = {min(os.sched_getaffinity(0))}
for task in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(task), one)
end = time.monotonic() + 2
while time.monotonic() < end:
    assert work(20) == wanted
"""


@pytest.fixture(autouse=True)
def threads() -> Iterator[int]:
    default_threads = native.threads()
    yield default_threads
    native.set_threads(default_threads)


def start(code: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", WORK + code], env=environment, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=1000)  # under sanitizers; pytest's own limit is shorter
    assert process.returncode == 0, errors


def test_thread_count_equals_usable_cpus(threads: int) -> None:
    assert threads == native.usable_cpus() == dispatch.usable_cpus()
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
        assert threads == min(allowed, native.cpu_quota() or allowed)
    native.set_threads(3)
    assert native.threads() == 3
    with pytest.raises(ValueError, match="at least 1"):
        native.set_threads(0)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads cannot be counted here")
def test_more_threads_than_cpus_start_no_more(threads: int) -> None:
    """More threads than CPUs would only preempt each other within a chunk."""
    finish(start(MANY))


def test_bits_independent_of_threads_and_callers() -> None:
    matrix = native.Matrix(torch.randn(1000, 300))
    x = torch.randn(20, 300)
    reference = torch.empty(20, 1000)
    matrix.linear(x, reference)
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
    assert all(torch.equal(reference, y) for y in results)


def test_thread_count_changes_between_jobs() -> None:
    matrix = native.Matrix(torch.randn(1000, 300))
    x = torch.randn(20, 300)
    reference = torch.empty(20, 1000)
    matrix.linear(x, reference)
    results = [torch.empty(20, 1000) for _ in range(40)]
    caller = threading.Thread(target=lambda: [matrix.linear(x, y) for y in results])
    caller.start()
    while caller.is_alive():
        for count in (1, 3, 2):
            native.set_threads(count)
            assert native.threads() == count
    caller.join()
    assert all(torch.equal(reference, y) for y in results)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_child_starts_own_pool() -> None:
    finish(start(FORK))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads cannot be moved here")
def test_threads_on_one_cpu_sleep_and_wake() -> None:
    """A thread that waits for another's chunk yields its CPU, and so does the caller."""
    finish(start(CROWDED))


def test_two_processes_share_cores() -> None:
    """Each job waits for the one chunk of a descheduled worker, and not for one time slice per thread."""
    processes = [start("work(1000)") for _ in range(2)]
    for process in processes:
        finish(process)

"""Trials in a process of their own: what they answer, and what becomes of trials that take too much."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import pytest

from triforce.sandbox import Trial, TrialError, TrialLimitError, TrialLimits, run_trial

HERE = "tests.test_sandbox"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


def echo(task: Any) -> Any:
    print("a library says something")
    return task


def refusing(task: str) -> None:
    raise ValueError(task)


def panicking(task: str) -> None:
    raise BaseException(task)


def busy(task: None) -> None:
    while True:
        pass


def hungry(task: int) -> int:
    return len(bytearray(task))


def aborting(task: None) -> None:
    os.abort()


def wordy(task: int) -> str:
    return "a" * task


def test_trial_answer_is_that_of_function() -> None:
    task = {"text": "東京\ud800\n", "numbers": [1, 2.5, None, True]}
    assert run_trial(f"{HERE}:echo", task) == task


@pytest.mark.parametrize("function", ["refusing", "panicking"])
def test_trial_error_is_its_reason(function: str) -> None:
    with pytest.raises(TrialError, match=r"^one\ntwo$") as caught:
        run_trial(f"{HERE}:{function}", "one\ntwo")
    assert not isinstance(caught.value, TrialLimitError)


@pytest.mark.parametrize(("function", "task"), [("hungry", 1 << 30), ("aborting", None), ("busy", None)])
def test_trial_beyond_limits_raises(function: str, task: object) -> None:
    with pytest.raises(TrialLimitError, match="more than 1 s or 256 MiB, or ends"):
        run_trial(f"{HERE}:{function}", task, TrialLimits(cpu_seconds=1, memory_bytes=256 << 20))


def test_trial_answer_too_long_raises() -> None:
    with pytest.raises(TrialError, match="answer is too long"):
        run_trial(f"{HERE}:wordy", 2 << 20)


def test_trial_without_progress_ends_by_the_clock() -> None:
    with pytest.raises(TrialLimitError):
        run_trial("time:sleep", 60, TrialLimits(wall_seconds=0.5))


def test_trial_stopped_by_another_thread_raises() -> None:
    trial = Trial("time:sleep", 60)
    threading.Timer(0.3, trial.stop).start()
    began = time.monotonic()
    with pytest.raises(TrialLimitError):
        trial.result()
    assert time.monotonic() - began < 20

"""Cases of each kind of file that strangers give, and what the fuzz itself notices."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.helpers.case_outcome import Limits
from tests.helpers.structured_fuzz import KINDS, FuzzRun, run_kind

FEW, SOME = 5, 300
"""Cases of each kind in `make check`, and in `make test-all`."""


def faults(kind: str, count: int, seed: int = 0) -> list[str]:
    """What is wrong with some cases of a kind, with their seeds."""
    outcomes = run_kind(kind, count, seed)
    return [f"seed {outcome.seed}: {outcome.fault}\n{outcome.stderr_end}" for outcome in outcomes if outcome.fault]


@pytest.mark.parametrize("kind", KINDS)
def test_few_cases_of_a_kind_end_in_one_line(kind: str) -> None:
    assert not faults(kind, FEW)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_many_cases_of_a_kind_end_in_one_line(kind: str) -> None:
    assert not faults(kind, SOME, seed=1000)


def nothing(random: Random, folder: Path) -> None:
    """Write no case."""


def refuses(folder: Path) -> int:
    print("triforce: error: no model; name one", file=sys.stderr)
    return 2


def refuses_at_length(folder: Path) -> int:
    print("why:", file=sys.stderr)
    return refuses(folder)


def raises(folder: Path) -> int:
    raise ValueError("uncaught on purpose")


def prints_escapes(folder: Path) -> int:
    print("a model named \x1b[31m")
    return 0


def waits(folder: Path) -> int:
    time.sleep(60)
    return 0


def leaves_a_process(folder: Path) -> int:
    if not os.fork():
        time.sleep(60)
    return 0


def takes_memory(folder: Path) -> int:
    return len(bytearray(1 << 29)) and 0


def is_killed(folder: Path) -> int:
    os.kill(os.getpid(), 9)
    return 0


@pytest.mark.parametrize(
    ("open_case", "message"),
    [
        (refuses, ""), (refuses_at_length, "not one line"), (raises, "Traceback"), (is_killed, "ended with -9"),
        (prints_escapes, "not to be printed"), (waits, "not done"), (leaves_a_process, "left a process"),
        (takes_memory, "Traceback"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_case_that_goes_wrong_has_a_fault(open_case: Callable[[Path], int], message: str) -> None:
    (outcome,) = FuzzRun("test", nothing, open_case, Limits(seconds=1, bytes=1 << 26)).cases(1)
    assert message in outcome.fault and bool(message) == bool(outcome.fault)


def test_cases_share_a_process_until_one_has_a_fault(tmp_path: Path) -> None:
    """What the first of them holds on to is not counted for the others."""
    processes, buffers = tmp_path / "processes", list[bytearray]()

    def open_case(folder: Path) -> int:
        with processes.open("a") as lines:
            lines.write(f"{os.getpid()}\n")
        if not buffers:
            buffers.append(bytearray(os.urandom(1 << 25)))
        return 70 if len(processes.read_text().split()) == 3 else 0

    outcomes = list(FuzzRun("test", nothing, open_case, Limits(bytes=1 << 27)).cases(4))
    assert [bool(outcome.fault) for outcome in outcomes] == [False, False, True, False]
    first_process, second, third, last_process = processes.read_text().split()
    assert first_process == second == third != last_process
    assert outcomes[0].bytes >= 1 << 25 > outcomes[1].bytes


def test_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    draws = list[float]()
    file = tmp_path / "outcomes"

    def make(random: Random, folder: Path) -> None:
        draws.append(random.random())

    begun_cases = [
        next(outcomes) for outcomes in [FuzzRun("test", make, refuses).cases(4, file=file)] for _ in range(2)
    ]
    with file.open("a") as lines:
        lines.write('{"seed": 2, "co')
    outcomes = list(FuzzRun("test", make, refuses).cases(4, file=file))
    assert outcomes[:2] == begun_cases and [outcome.seed for outcome in outcomes] == [0, 1, 2, 3]
    assert len(draws) == len(set(draws)) == 4
    assert len(list(FuzzRun("another", make, refuses).cases(4, file=file))) == 4 and len(draws) == 8

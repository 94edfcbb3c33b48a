"""Structured fuzz: cases of one kind by their seeds, opened in forked processes. An interrupted run resumes.

`python -m tests.helpers.structured_fuzz KIND [--count N] [--first SEED] [--file FILE]`. A kind is a module of
tests/helpers/fuzz_kinds with two functions: `make_case(random, folder)` writes a case into an empty folder, and
`open_case(folder)` opens it as users do and returns an exit code, 0 or 2 (see `forked_case`). Its `WHOLES` write cases
that have no fault: they are opened in this process first, so that forks find imported what they need. FILE has an
outcome a line.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from random import Random

from tests.helpers.case_outcome import Limits, Outcome
from tests.helpers.forked_case import CaseProcess, Opener, computing_alone
from tests.helpers.resumed_run import digest

KINDS = sorted(file.stem for file in (Path(__file__).parent / "fuzz_kinds").glob("*.py"))
TOGETHER = 25
"""Cases per process: a fork of a process with torch takes longer than most cases."""

Maker = Callable[[Random, Path], None]
"""Writes a case into an empty folder, the same one for the same random numbers."""


class FuzzRun:
    """Cases of one kind, made and opened one by one."""

    def __init__(self, kind: str, make_case: Maker, open_case: Opener, limits: Limits | None = None) -> None:
        self.kind = kind
        self._make_case = make_case
        self._open_case = open_case
        self._limits = limits or Limits()
        self._process: CaseProcess | None = None

    def cases(self, count: int, seed: int = 0, file: Path | None = None) -> Iterator[Outcome]:
        """Yield the outcomes of `count` cases from `seed` on, each as soon as it is known.

        file: has the outcomes of an earlier run of this kind and this code; those cases are not run again.
        """
        outcomes_by_number = _known(file, self.kind) if file else {}
        try:
            for number in range(seed, seed + count):
                if number not in outcomes_by_number:
                    outcomes_by_number[number] = self._outcome(number)
                    if file:
                        with file.open("a") as lines:
                            lines.write(json.dumps(outcomes_by_number[number]._asdict()) + "\n")
                yield outcomes_by_number[number]
        finally:
            if self._process:
                self._process.end()

    def _outcome(self, number: int) -> Outcome:
        """Make and open a case; retry it once if it took too long, as a machine may stall."""
        for is_retry in (False, True):
            with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as folder:
                self._make_case(Random(f"{self.kind} {number}"), Path(folder))
                outcome = self._next_process().open(number, Path(folder))
            if is_retry or outcome.seconds < self._limits.seconds:
                break
        return outcome

    def _next_process(self) -> CaseProcess:
        if self._process and self._process.opened >= TOGETHER:
            self._process.end()
        if not self._process or self._process.ended:
            self._process = CaseProcess(self._open_case, self._limits)
        return self._process


def run_kind(kind: str, count: int, seed: int = 0, file: Path | None = None) -> Iterator[Outcome]:
    """Yield the outcomes of `count` cases of a kind by its name; its module may name other `LIMITS`."""
    module = import_module(f"tests.helpers.fuzz_kinds.{kind}")
    run = FuzzRun(kind, module.make_case, module.open_case, getattr(module, "LIMITS", None))
    open_wholes(module.WHOLES, module.open_case)
    try:
        yield from run.cases(count, seed, file)
    finally:
        gc.unfreeze()


def open_wholes(wholes: Sequence[Callable[[Path], object]], open_case: Opener) -> None:
    """Open cases without faults in this process. Their objects are frozen, so that forks do not collect them."""
    with computing_alone():
        for make_whole in wholes:
            with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, redirect_stdout(StringIO()):
                make_whole(Path(folder))
                assert open_case(Path(folder)) == 0
    gc.collect()
    gc.freeze()


def _known(file: Path, kind: str) -> dict[int, Outcome]:
    """Return outcomes by seed. A file of another kind or of other code is restarted."""
    head = f"{kind} {digest(['src', 'csrc', 'tests'])}"
    recorded_head, *lines = file.read_text().splitlines() if file.exists() else [""]
    complete_lines = (
        [line for line in lines if line.endswith("}")] if recorded_head == head else []
    )  # the last may be cut off
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([head, *complete_lines, ""]))
    outcomes = [Outcome(**json.loads(line)) for line in complete_lines]
    return {outcome.seed: outcome for outcome in outcomes}


def main(argv: list[str] | None = None) -> int:
    """Run cases; print those with faults, and their number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--file", type=Path, help="default: build/fuzz/KIND.jsonl")
    options = parser.parse_args(argv)
    file = options.file or Path("build/fuzz") / f"{options.kind}.jsonl"
    outcomes = []
    for outcome in run_kind(options.kind, options.count, options.first, file):
        outcomes.append(outcome)
        if outcome.fault:
            print(f"seed {outcome.seed}: {outcome.fault}\n{outcome.stderr_end}", flush=True)
        if sys.stderr.isatty():
            print(f"\r{len(outcomes):,} of {options.count:,}", end="", file=sys.stderr, flush=True)
    faults, refused = (
        sum(map(bool, column)) for column in zip(*((outcome.fault, outcome.code) for outcome in outcomes), strict=True)
    )
    slowest = max(outcome.seconds for outcome in outcomes)
    largest = max(outcome.bytes for outcome in outcomes) >> 20
    print(f"{len(outcomes):,} cases: {refused:,} refused, {slowest:g} s and {largest} MiB at most, {faults:,} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="fuzz-cache-") as own_cache:  # files that pass a trial are recorded there
        os.environ["XDG_CACHE_HOME"] = own_cache
        sys.exit(main())

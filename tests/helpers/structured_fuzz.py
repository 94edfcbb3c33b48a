"""Structured fuzz: cases of one kind by their seeds, each in a forked process. A run that was cut off goes on.

`python -m tests.helpers.structured_fuzz KIND [--count N] [--first SEED] [--file FILE]`. A kind is a module of
tests/helpers/fuzz_kinds with two functions: `make_case(random, folder)` writes a case into an empty folder, and
`open_case(folder)` opens it as users do and returns an exit code, 0 or 2 (see `forked_case`). FILE has an outcome a
line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from random import Random

from tests.helpers.forked_case import Limits, Opener, Outcome, run_case
from tests.helpers.resumed_run import digest

KINDS = sorted(file.stem for file in (Path(__file__).parent / "fuzz_kinds").glob("*.py"))

Maker = Callable[[Random, Path], None]
"""Writes a case into an empty folder: the same one for the same random numbers."""


def run_cases(
    kind: str, make_case: Maker, open_case: Opener, count: int, seed: int = 0, limits: Limits | None = None,
    file: Path | None = None,
) -> Iterator[Outcome]:  # fmt: skip
    """Yield the outcomes of `count` cases from `seed` on, each as it is known.

    file: has the outcomes of an earlier run of this kind and this code; those cases are not run again.
    """
    known = _known(file, kind) if file else {}
    for number in range(seed, seed + count):
        if number not in known:
            with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as folder:
                make_case(Random(f"{kind} {number}"), Path(folder))
                known[number] = run_case(number, Path(folder), open_case, limits or Limits())
            if file:
                with file.open("a") as lines:
                    lines.write(json.dumps(known[number]._asdict()) + "\n")
        yield known[number]


def run_kind(kind: str, count: int, seed: int = 0, file: Path | None = None) -> Iterator[Outcome]:
    """Yield the outcomes of `count` cases of a kind by its name; its module may name other `LIMITS`."""
    module = import_module(f"tests.helpers.fuzz_kinds.{kind}")
    limits = getattr(module, "LIMITS", None)
    return run_cases(kind, module.make_case, module.open_case, count, seed, limits, file)


def _known(file: Path, kind: str) -> dict[int, Outcome]:
    """Return outcomes by seed; begin the file anew where it is of another kind or of other code."""
    head = f"{kind} {digest(['src', 'csrc', 'tests'])}"
    first, *lines = file.read_text().splitlines() if file.exists() else [""]
    kept = [line for line in lines if line.endswith("}")] if first == head else []  # the last may be cut off
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([head, *kept, ""]))
    outcomes = [Outcome(**json.loads(line)) for line in kept]
    return {outcome.seed: outcome for outcome in outcomes}


def main(argv: list[str] | None = None) -> int:
    """Run cases; print those that will not do, and how many there were."""
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
            print(f"seed {outcome.seed}: {outcome.fault}\n{outcome.said}", flush=True)
        if sys.stderr.isatty():
            print(f"\r{len(outcomes):,} of {options.count:,}", end="", file=sys.stderr, flush=True)
    faults, refused = (
        sum(map(bool, told)) for told in zip(*((each.fault, each.code) for each in outcomes), strict=True)
    )
    slowest, largest = max(each.seconds for each in outcomes), max(each.bytes for each in outcomes) >> 20
    print(f"{len(outcomes):,} cases: {refused:,} refused, {slowest:g} s and {largest} MiB at most, {faults:,} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks that a machine computes what it should: the checks of `triforce doctor`, and tests by name."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks.on_gpu.piece import Piece, Row, Setup
from triforce.bench.checkup import Check, Checkup
from triforce.cli.bench.setup import own_texts
from triforce.cli.text_files import BOOK

ROOT = Path(__file__).parents[2]
CODES = "tests/backends/cuda/test_triton_codes.py"
INT8_TESTS = {
    "attention over int8 KV": "over_codes_equals_float64 or over_thousands_of_codes",
    "codes and passes of int8 KV": "codes_are_those or rotated_heads_are_those or passes_over_codes_equal_torch",
}
"""Tests of int8 KV: the second of those of attention failed on an H200, its mass in bfloat16 (docs/gpu.md)."""
TEST_SECONDS, TAIL = 120, 60
"""Seconds that tests may take, and lines of what they say that are kept."""


def doctor(setup: Setup) -> Iterator[Piece]:
    """Yield the checks of `triforce doctor`. Each raises where something is wrong."""
    for check in Checkup(setup.device, own_texts()[BOOK]).checks():
        yield Piece(f"check of {check.name}", "shipped pair", 0, partial(_passed, check))


def _passed(check: Check) -> Row:
    began = perf_counter()
    line, figures = check.run()
    return {"seconds": perf_counter() - began, "found": line, "figures": figures}


def int8_tests(setup: Setup) -> Iterator[Piece]:
    """Tests of int8 KV in processes of their own, which may lose the device for themselves alone."""
    for what, names in INT8_TESTS.items():
        yield Piece(f"tests of {what}", "small", 0, partial(_tested, names))


def _tested(names: str) -> Row:
    """How tests end, and the last of what they say: of a failure its assertion."""
    command = [sys.executable, "-m", "pytest", CODES, "-k", names, "-q", "--tb=short", "--no-header"]
    began = perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TEST_SECONDS)
    output_lines = (done.stdout + done.stderr).splitlines()
    counts = {
        what: sum(map(int, re.findall(rf"(\d+) {what}", output_lines[-1] if output_lines else "")))
        for what in ("passed", "failed")
    }
    return {
        "seconds": perf_counter() - began, "exit_code": done.returncode, **counts,
        "failures": [line for line in output_lines if line.startswith(("FAILED", "ERROR"))],
        "tail": output_lines[-TAIL:],
    }  # fmt: skip

"""All faults that tests plant, each with the test that notices it: `make mutants` prints them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.helpers.mutants import (
    cuda,
    disk_cache,
    eagle_head,
    engine,
    families,
    kv_views,
    others,
    verification,
    windows,
)

MUTANTS = [
    mutant
    for module in (verification, kv_views, engine, disk_cache, families, windows, eagle_head, others, cuda)
    if module is not cuda or find_spec("triton")
    for mutant in module.MUTANTS
]
NATIVE = {
    "out_of_bounds": "address",
    "use_after_free": "address",
    "leak": "address",
    "too_wide_a_shift": "undefined",
    "overflow": "undefined",
    "race": "thread",
}
"""Functions of planted.cpp, and the sanitizer that must find each (scripts/sanitize.sh)."""


SLOW = {
    "a lower tier rewrites a committed slot",
    "a retrieval view is not rewound",
    "each KV head reads its neighbour's selection",
    "gguf: a header may end anywhere",
    "gguf: counts are believed",
    "merge: splits hang from no peak",
    "merge: the first dimensions everywhere",
    "no residual anywhere",
    "no residual in the middle tier only",
    "parts: a nucleus ends at the first power of two",
    "parts: cuts do not shorten the list",
    "parts: light tokens weigh nothing",
    "parts: parts before are forgotten",
    "parts: the last of the list is left out",
}
"""Mutants that take seconds to be noticed: they are planted in `make test-all` alone."""


def caught_in(test: str) -> list[Any]:
    """Mutants that the test function of this name notices, as its parameters."""
    found = [mutant for mutant in MUTANTS if mutant.test.endswith(f"::{test}")]
    assert found, f"no mutant is registered for {test}"
    return [pytest.param(mutant, marks=pytest.mark.slow) if mutant.name in SLOW else mutant for mutant in found]


def table() -> Iterator[tuple[str, str, str]]:
    """Of each mutant its name, what it changes, and what notices it."""
    for mutant in MUTANTS:
        checks = f" [{', '.join(mutant.checks)}]" if mutant.checks else ""
        yield mutant.name, ", ".join(edit.target for edit in mutant.edits), mutant.test + checks
    for name, kind in NATIVE.items():
        yield name, f"tests/helpers/mutants/planted.cpp:{name}", f"scripts/sanitize.sh --self-test {kind}"

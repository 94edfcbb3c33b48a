"""Laws of the disk cache, and the faults that they catch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.disk_checks import CHECKS
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in


@pytest.mark.parametrize("law", CHECKS)
def test_disk_cache_law_holds(disk_pair: Path, cache: Path, law: str) -> None:
    CHECKS[law](disk_pair, cache)


@pytest.mark.parametrize("mutant", caught_in("test_disk_cache_mutant_is_noticed"), ids=str)
def test_disk_cache_mutant_is_noticed(
    disk_pair: Path, cache: Path, mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    (law,) = mutant.checks
    if law == "texts":  # their fixtures are made before the fault is planted
        from tests.helpers.disk_llm import PROMPT
        from tests.helpers.tiny_llm import ask, llm

        llm(disk_pair, coupling="rejection").generate(PROMPT, ask(), mode="triforce")
    mutant.apply(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        CHECKS[law](disk_pair, cache)

"""Laws of the disk cache, and faults that they notice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.disk_checks import CHECKS
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.tiny_llm import checkpoints
from triforce.kvcache import disk_text

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    checkpoints(folder, head_dim=16)
    return folder


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes no time, however busy this machine is."""
    monkeypatch.setattr(disk_text, "perf_counter", lambda: 0.0)


@pytest.mark.parametrize("law", CHECKS)
def test_disk_cache_law_holds(folder: Path, tmp_path: Path, law: str) -> None:
    CHECKS[law](folder, tmp_path / "cache")


@pytest.mark.parametrize("mutant", caught_in("test_disk_cache_mutant_is_noticed"), ids=str)
def test_disk_cache_mutant_is_noticed(
    folder: Path, tmp_path: Path, mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    (law,) = mutant.checks
    if law == "texts":  # what these have is made before the fault is there
        from tests.helpers.disk_llm import PROMPT
        from tests.helpers.tiny_llm import ask, llm

        llm(folder, coupling="rejection").generate(PROMPT, ask(), mode="triforce")
    mutant.apply(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        CHECKS[law](folder, tmp_path / "cache")

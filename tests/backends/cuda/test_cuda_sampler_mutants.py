"""The Triton sampler broken on purpose: each edit of its source must fail a check."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers.cuda.sampler_checks import (
    decides_as_torch_does,
    exact_masses,
    largest_in_one_part,
    law_is_exact,
    looked_at_by,
    lowest_ids_stay,
    many_equals,
    noise_far_away,
    nuclei,
)
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from triforce.speculation import Rejection, Seeded

torch.set_num_threads(1)
CHECKS: dict[str, Callable[[], object]] = {
    "lowest ids": partial(lowest_ids_stay, [0.7]),
    "many equals": many_equals,
    "exact masses": exact_masses,
    "nuclei": nuclei,
    "exact law": law_is_exact,
    "far noise": partial(noise_far_away, 513),
    "residuals": partial(decides_as_torch_does, 97, range(3, 6), Rejection),
    "picks": partial(decides_as_torch_does, 97, range(3, 6), Seeded),
    "largest in one part": largest_in_one_part,
}
"""Checks by the names in `Mutant.checks`. The prefix PARTS runs several programs per column."""
PARTS = "in parts: "


@pytest.mark.parametrize("mutant", caught_in("test_cuda_sampler_mutant_fails_its_check"), ids=str)
def test_cuda_sampler_mutant_fails_its_check(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch, tmp_path)
    (check,) = mutant.checks
    with looked_at_by(64 if check.startswith(PARTS) else None), pytest.raises(AssertionError):
        CHECKS[check.removeprefix(PARTS)]()

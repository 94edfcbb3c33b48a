"""The Triton sampler broken on purpose: each edit of its source must fail a check."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.helpers.cuda.sampler_checks import (
    decides_as_torch_does,
    exact_masses,
    law_is_exact,
    lowest_ids_stay,
    many_equals,
    noise_far_away,
    nuclei,
)
from triforce.backends.cuda import sampler as triton_sampler
from triforce.backends.cuda.triton import rng, sampler, truncation
from triforce.speculation import Rejection, Seeded

torch.set_num_threads(1)
residuals = partial(decides_as_torch_does, 97, range(3, 6), Rejection)
picks = partial(decides_as_torch_does, 97, range(3, 6), Seeded)
MUTANTS: dict[str, tuple[ModuleType, str, str, Callable[[], object]]] = {
    "one too many among equals": (truncation, "rank_N <= room", "rank_N <= room + 1", partial(lowest_ids_stay, [0.7])),
    "equals counted in each block alone": (truncation, "rank_N = level + ", "rank_N = ", many_equals),
    "as many as the mass and one more": (truncation, "(held < mass) & (room", "(held <= mass) & (room", exact_masses),
    "the sum of all at once": (
        truncation, "held, room = held + edge, room + 1",
        "held, room = tl.sum(heavy_N, 0) + (room + 1) * edge, room + 1", exact_masses,
    ),
    "an edge in the middle": (truncation, "return low\n", "return 0.5 * (low + high) * 0.999\n", nuclei),
    "no more than the largest": (truncation, "tl.where(k == 1, peak, low)", "peak", many_equals),
    "no residual": (sampler, "refused, other=0.0), 0.0)", "refused & False, other=0.0), 0.0)", residuals),
    "accepted a little too easily": (sampler, "uniform * q < p", "uniform * q < 1.01 * p", law_is_exact),
    "one uniform to accept and to draw": (sampler, "uniforms + 1 + j", "uniforms + j", residuals),
    "the last column left out": (sampler, "j <= last", "j < last", picks),
    "the noise of the neighbour": (
        rng, "tl.where(token_N % 2 == 0, w0, w2)", "w0", partial(noise_far_away, 513),
    ),
    "the noise of another position": (sampler, "tl.load(places + b) + j", "tl.load(places + b)", picks),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_what_must_be_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, old, new, check = MUTANTS[name]
    source = inspect.getsource(original)
    assert source.count(old) == 1, f"{old!r} is not once in {original.__name__}"
    path = tmp_path / "broken.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("broken", path)
    assert spec and spec.loader
    broken = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "broken", broken)
    spec.loader.exec_module(broken)
    for user in (sampler, triton_sampler):
        for key, value in vars(broken).items():
            if key in vars(original) and vars(user).get(key) is vars(original)[key]:
                monkeypatch.setattr(user, key, value)
    with pytest.raises(AssertionError):
        check()

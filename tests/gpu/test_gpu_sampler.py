"""The fused sampler in Triton against the one in torch: same laws, same picks, same guesses kept, same errors.

Shape suffixes: B rows, K guesses, J = K + 1, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.laws.cases import EXACT
from tests.laws.one_verification import deviation, fused, warped
from tests.sampler_scenes import (
    COUPLINGS,
    CUTS,
    EQUAL,
    TEMPERATURES,
    Scene,
    agree,
    laws,
    noise_of,
    same_law,
    scene,
    verdict,
)
from tests.samplers import torch_sampling
from triforce import triton_sampler
from triforce.errors import ModelError, RequestError
from triforce.kernels import extension
from triforce.kernels.triton import cuts, noise, sampler
from triforce.request import SamplingParams
from triforce.sampler import TorchSampling, sampling
from triforce.shapes import ints
from triforce.speculation import Block, Draft, Prefix, Rejection, Seeded
from triforce.triton_sampler import TritonSampling

torch.set_num_threads(1)
each_coupling = pytest.mark.parametrize("coupling", COUPLINGS)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def decides_as_torch_does(vocab_size: int, seeds: range, coupling: type) -> None:
    for seed in seeds:
        agree(scene(seed, vocab_size, rows=3, guesses=2), TritonSampling, coupling)


def same_laws(logits_BV: Tensor, params: list[SamplingParams]) -> None:
    same_law(*(laws(each, logits_BV, params) for each in (TritonSampling, torch_sampling)))


@each_coupling
@pytest.mark.parametrize(("vocab_size", "seeds"), [(7, range(3)), (97, range(3, 6)), (600, range(6, 8))])
def test_decides_as_torch_does(vocab_size: int, seeds: range, coupling: type) -> None:
    decides_as_torch_does(vocab_size, seeds, coupling)


@pytest.mark.slow
@each_coupling
@pytest.mark.parametrize(("vocab_size", "times"), [(6, 100), (97, 100), (700, 50), (3001, 5)])
def test_always(vocab_size: int, times: int, coupling: type) -> None:
    decides_as_torch_does(vocab_size, range(10, 10 + times), coupling)


def lowest_ids_stay(temperatures: list[float]) -> None:
    params = [SamplingParams(temperature=t, **cut) for t in temperatures for cut in CUTS]  # type: ignore[arg-type]
    same_laws(EQUAL.expand(len(params), -1), params)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of scores at a tiny temperature, which numpy reports
def test_the_lowest_ids_stay_among_equals() -> None:
    lowest_ids_stay(TEMPERATURES[::2])


def many_equals() -> None:
    """Heaps of equal logits across blocks; the last row has fewer tokens than top-k asks for."""
    logits_BV = normal(6, 600).round()
    logits_BV[5, torch.arange(600) % 9 > 0] = -math.inf
    params = [
        SamplingParams(top_k=300),
        SamplingParams(top_p=0.6),
        SamplingParams(0.8, top_k=450, top_p=0.9, min_p=0.001),
        SamplingParams(min_p=0.2),
        SamplingParams(0.0, top_k=3, top_p=0.5),
        SamplingParams(1.5, top_k=300),
    ]
    same_laws(logits_BV, params)


def test_many_equals() -> None:
    many_equals()


def nuclei() -> None:
    """Few tokens or most; a float64 that is far from the others."""
    logits_BV = torch.tensor([0.0, 0.05, 1.0, 8.0]).double()[:, None] * normal(4, 600, seed=1)
    logits_BV[1, 3] = -1e300
    for top_p in (0.1, 0.9, 0.999, 1 - 1e-12):
        same_laws(logits_BV, [SamplingParams(top_p=top_p)] * 4)


def test_any_nucleus() -> None:
    nuclei()


def exact_masses() -> None:
    """Equal tokens that hold just the mass, or would if their sum were not rounded."""
    for size, masses in ((8, (0.125, 0.5, 0.875)), (10, (0.3, 0.7, 0.8))):
        same_laws(torch.zeros(len(masses), size), [SamplingParams(top_p=mass) for mass in masses])


def test_exact_masses() -> None:
    exact_masses()


def test_the_smallest_probabilities() -> None:
    """Down to the subnormal ones and to what is 0."""
    logits_BV = -torch.arange(0, 800, 1.37)[None]
    expected, got = (laws(each, logits_BV, [SamplingParams()]) for each in (torch_sampling, TritonSampling))
    small = expected > 0
    assert torch.equal(got > 0, small) and 0 < expected[small].min() < 1e-310
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-322)


@each_coupling
def test_parts_of_larger_tensors(coupling: type) -> None:
    """Logits of a graph's padded pass, and guesses cut from longer drafts; bfloat16 too."""
    whole = scene(4, 30)
    padded = torch.full((5, 7, 30), math.nan).bfloat16()
    padded[:4, :4] = whole.logits_BJV
    longer = torch.full((4, 5, 30), math.nan).double()
    longer[:, :3] = whole.guess.laws_BKV
    guess = replace(whole.guess, laws_BKV=longer[:, :3])
    agree(replace(whole, logits_BJV=padded[:4, :4], guess=guess), TritonSampling, coupling)


@pytest.mark.parametrize("vocab_size", [1, 513])
def test_noise_at_far_positions(vocab_size: int) -> None:
    """Without cuts each token has a chance, so that a wrong bit of any token's noise would show."""
    lengths_B = ints([1, 2**31 - 1, 2**31, 2**32 - 2])
    prefix, live_B = Prefix(np.zeros((4, 1), dtype=np.int64), lengths_B), np.ones(4, dtype=np.bool_)
    logits_BJV = normal(4, 1, vocab_size) / 3
    whole = Scene([SamplingParams()] * 4, [0] * 4, prefix, live_B, logits_BJV, Draft.empty(4, 0))
    agree(whole, TritonSampling, Seeded)


@pytest.mark.parametrize(("bad", "what"), [(math.nan, "NaN"), (math.inf, r"\+inf"), (-math.inf, "all -inf")])
def test_refuses_logits_that_make_no_law(bad: float, what: str) -> None:
    """In padding and rows that are done, too: then the model is broken."""
    whole = scene(1, 300)
    whole.guess.counts_B[:], whole.live_B[:] = 0, [True, True, False, True]
    whole.logits_BJV[2, 3, slice(None) if bad == -math.inf else 270] = bad
    whole.logits_BJV[3, 0, 5] = math.nan
    for coupling in COUPLINGS:
        with pytest.raises(ModelError, match=rf"{what} \(row 2, column 3\)"):
            verdict(whole, TritonSampling, coupling)


def test_refuses_a_bias_outside_the_vocabulary() -> None:
    with pytest.raises(RequestError, match="token 8, but the vocabulary ends at 7"):
        TritonSampling([SamplingParams(logit_bias={8: 1.0})], [0], 8, Seeded(noise_of([0])))


def test_uniforms_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "native", None)
    drawn = {}
    for wanted in ("torch", "triton"):
        monkeypatch.setattr(extension, "wanted", wanted)
        rows = noise_of([0, 1, 2])
        rows.draws += 2**32 - 3  # both words of the counter
        asked = ((0, 3, [0, 2, 3]), (7, 1, [1, 0, 1]), (0, 9, [9, 9, 0]), (0, 0, [0, 0, 0]), (0, 4, [1, 2, 3]))
        drawn[wanted] = [rows.uniforms(tier, n, ints(used)) for tier, n, used in asked] + [rows.draws]
    assert all(map(torch.equal, drawn["torch"], drawn["triton"]))


def test_which_sampler_is_taken(by_name: None, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ([SamplingParams()], [0], 8)
    assert isinstance(sampling(*arguments, Seeded(noise_of([0]))), TritonSampling)
    assert isinstance(sampling(*arguments, Rejection(noise_of([0]))), TritonSampling)
    assert isinstance(sampling(*arguments, Block(noise_of([0]))), TorchSampling)  # it judges one by one
    monkeypatch.setattr(extension, "wanted", "torch")
    assert isinstance(sampling(*arguments, Seeded(noise_of([0]))), TorchSampling)


def law_is_exact(vocab_size: int = 2, counts: tuple[int, ...] = (1,)) -> None:
    """Of what one verification emits: integrated as in tests/laws."""
    p, q = (warped(seed, SamplingParams(), vocab_size, 0.5) for seed in (1, 2))
    assert deviation(p, q, counts, partial(fused, TritonSampling)) < EXACT


def test_emits_the_law_of_the_verifier() -> None:
    law_is_exact()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_emits_the_law_of_the_verifier_behind_more_guesses() -> None:
    law_is_exact(3, (0, 1, 2))


def residuals() -> None:
    decides_as_torch_does(97, range(3, 6), Rejection)


MUTANTS: dict[str, tuple[ModuleType, str, str, Callable[[], object]]] = {
    "one too many among equals": (cuts, "rank_N <= room", "rank_N <= room + 1", partial(lowest_ids_stay, [0.7])),
    "equals counted in each block alone": (cuts, "rank_N = level + ", "rank_N = ", many_equals),
    "as many as the mass and one more": (cuts, "(held < mass) & (room", "(held <= mass) & (room", exact_masses),
    "the sum of all at once": (
        cuts, "held, room = held + edge, room + 1", "held, room = tl.sum(heavy_N, 0) + (room + 1) * edge, room + 1",
        exact_masses,
    ),
    "an edge in the middle": (cuts, "return low\n", "return 0.5 * (low + high) * 0.999\n", nuclei),
    "no more than the largest": (cuts, "tl.where(k == 1, peak, low)", "peak", many_equals),
    "no residual": (sampler, "refused, other=0.0), 0.0)", "refused & False, other=0.0), 0.0)", residuals),
    "accepted a little too easily": (sampler, "uniform * q < p", "uniform * q < 1.01 * p", law_is_exact),
    "one uniform to accept and to draw": (sampler, "uniforms + 1 + j", "uniforms + j", residuals),
    "padding judged": (sampler, "j <= last", "j < last", partial(decides_as_torch_does, 97, range(3, 4), Seeded)),
    "the noise of the neighbour": (
        noise, "tl.where(token_N % 2 == 0, w0, w2)", "w0", partial(test_noise_at_far_positions, 513),
    ),
    "the noise of another position": (
        sampler, "tl.load(places + b) + j", "tl.load(places + b)",
        partial(decides_as_torch_does, 97, range(3, 6), Seeded),
    ),
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

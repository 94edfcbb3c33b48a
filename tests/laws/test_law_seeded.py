"""Under `seeded` the text is plain decoding's for any tiers, with every noise of a finite set at every position.

Equal texts under equal noise have equal laws; that the exponential race draws from p is shown at the end, exactly.
Shape suffixes: B rows, V vocabulary, J columns, M noises, H positions, N nodes, P corners.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.laws.cases import CASES, EXACT, Case
from tests.helpers.laws.enumeration import TierStack
from tests.helpers.samplers import Sampler, each_sampler, native_sampling, needs_native, torch_sampling
from triforce.arrays import on_device
from triforce.backends.torch.logits_processor import LogitsProcessor
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import Ints
from triforce.speculation import Draft, Seeded, SequenceState
from triforce.speculation import verification as couplings

torch.set_num_threads(1)
V = 3
NOISES = 3
HORIZON = 6
ASSIGNED = torch.tensor([*product(range(NOISES), repeat=HORIZON)])
SETTINGS = {
    "neutral": SamplingParams(),
    "penalties": SamplingParams(0.7, repetition_penalty=1.5, presence_penalty=0.6, frequency_penalty=0.4),
    "cuts": SamplingParams(1.3, top_k=2, top_p=0.9, min_p=0.05, logit_bias={1: 0.7}),
    "greedy": SamplingParams(temperature=0, presence_penalty=0.5),
}
STACK_CASES = {(case.gammas, case.lookup, case.selects): case for case in CASES if not case.slow}


class Assigned:
    """Row b has noise ASSIGNED[b] at its new positions, the first beyond them."""

    def __init__(self, prompt: int, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.noise_MV = torch.empty(NOISES, vocab_size, dtype=torch.float64).exponential_(generator=generator)
        self.prompt = prompt

    def exponentials(self, positions_BJ: Ints, vocab_size: int) -> Tensor:
        new_BJ = on_device(positions_BJ, "cpu") - self.prompt
        within_BJ = (new_BJ >= 0) & (new_BJ < HORIZON)
        return self.noise_MV[torch.where(within_BJ, ASSIGNED.gather(1, new_BJ.clamp(0, HORIZON - 1)), 0)]


class Given:
    """Noise that returns given exponentials (B, V) at any position."""

    def __init__(self, exponentials_BV: Tensor) -> None:
        self.exponentials_BV = exponentials_BV

    def exponentials(self, positions_BJ: Ints, vocab_size: int) -> Tensor:
        return self.exponentials_BV[:, None].expand(-1, positions_BJ.shape[1], -1).contiguous()


def random_stack(case: Case, params: SamplingParams, sampler: Sampler = torch_sampling) -> TierStack:
    """Return the tiers of a case with random laws that resemble each other."""
    generator = torch.Generator().manual_seed(3)
    common = torch.randn(V, V, V, generator=generator, dtype=torch.float64)
    sizes = [(V,) * (3 + (case.selects and level == 0)) for level in range(case.models)]
    tables = [common + torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    return replace(case.stack(tables), params=params, coupling=Seeded, sampler=sampler)


def speculated(stack: TierStack) -> Tensor:
    """Return the first HORIZON tokens under each assignment of noise."""
    branches = stack.start(HORIZON, len(ASSIGNED))
    noise = Assigned(len(stack.prompt), stack.vocab_size)
    while branches.live_B.any():
        branches = stack.play(branches, noise)
        branches.live_B = branches.lengths_B < len(stack.prompt) + HORIZON
    return branches.ids_BS[:, len(stack.prompt) :][:, :HORIZON]


def plain(stack: TierStack) -> Tensor:
    """Return the same tokens without tiers and drafts: one law, one pick, one token at a time."""
    noise = Assigned(len(stack.prompt), stack.vocab_size)
    ids_BS = torch.tensor(stack.prompt).repeat(len(ASSIGNED), 1)
    processor = LogitsProcessor([stack.params] * len(ASSIGNED), [len(stack.prompt)] * len(ASSIGNED), stack.vocab_size)
    for t in range(HORIZON):
        lengths_B = torch.full((len(ASSIGNED),), ids_BS.shape[1])
        logits_BV = stack.tiers[-1][0][ids_BS[:, -2], ids_BS[:, -1]]
        probs_BV = processor(logits_BV[:, None], ids_BS, lengths_B)[:, 0]
        times_BV = torch.where(probs_BV > 0, noise.noise_MV[ASSIGNED[:, t]] / probs_BV, torch.inf)
        ids_BS = torch.cat([ids_BS, times_BV.argmin(1, keepdim=True)], 1)
    return ids_BS[:, len(stack.prompt) :]


@each_sampler
@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("case", STACK_CASES.values(), ids=lambda case: case.name)
def test_seeded_text_equals_plain_decoding(case: Case, params: SamplingParams, sampler: Sampler) -> None:
    stack = random_stack(case, params, sampler)
    assert torch.equal(speculated(stack), plain(stack))


Race = Callable[[Tensor, Tensor], Tensor]


def native_race(probs_V: Tensor, exponentials_NV: Tensor) -> Tensor:
    """Return the picks of a native pass without draft tokens."""
    rows = len(exponentials_NV)
    sampling = native_sampling([SamplingParams()] * rows, [0] * rows, len(probs_V), Seeded(Given(exponentials_NV)))
    prefix = SequenceState(np.zeros((rows, 1), dtype=np.int64), np.zeros(rows, dtype=np.int64))
    logits_NJV = probs_V.log().repeat(rows, 1, 1)
    step = sampling.verify(Draft.empty(rows, 0), logits_NJV, prefix, np.ones(rows, dtype=np.bool_), 0)
    return torch.from_numpy(step.tokens_BK[:, 0])


RACES = [pytest.param(couplings.race, id="torch"), pytest.param(native_race, id="native", marks=needs_native)]


@pytest.mark.parametrize("race", RACES)
@pytest.mark.parametrize(
    "law", [(0.3, 0.7), (0.05, 0.95), (0.2, 0.5, 0.3), (0.6, 0.0, 0.4), (0.25, 0.25, 0.5), (1.0, 0.0)]
)
def test_seeded_race_draws_from_law(law: tuple[float, ...], race: Race) -> None:
    """Token i wins at time t exactly if each other token j comes after t p_j / p_i, which has probability
    exp(-t p_j / p_i): looked up at the corners of that orthant, integrated over t by Gauss-Laguerre quadrature."""
    p_V = torch.tensor(law, dtype=torch.float64)
    for i, chance in enumerate(law):
        assert abs(win_probability(p_V, i, race) - chance) < EXACT


def win_probability(p_V: Tensor, i: int, race: Race) -> float:
    """Return P(a race picks token i), integrated over times t = p_i s: the integrand is smooth in s for any law."""
    if p_V[i] == 0:
        times_NV = torch.logspace(-12, 2, 30, dtype=torch.float64)[:, None].repeat(1, len(p_V))
        times_NV[:, i] = 2.0**-53  # the earliest possible time
        assert not (race(p_V, times_NV) == i).any()
        return 0.0
    nodes, weights = map(torch.from_numpy, np.polynomial.laguerre.laggauss(60))
    competitors = [j for j in range(len(p_V)) if j != i]
    borders_NV = nodes[:, None] * p_V
    for signs in product((False, True), repeat=len(competitors)):
        sides = torch.tensor(signs, dtype=torch.float64)
        times_NV = borders_NV.clone()
        times_NV[:, competitors] *= 1 + 1e-12 * (2 * sides - 1)
        times_NV[:, competitors] += sides * 2.0**-53  # where p_j = 0, any time is after the border
        possible_N = (times_NV > 0).all(1)  # no time is 0
        assert ((race(p_V, times_NV) == i) == all(signs))[possible_N].all()
    survival_N = (-borders_NV[:, competitors]).exp().prod(1)
    density_N = p_V[i] * (nodes - borders_NV[:, i]).exp()  # of t, per ds, over the exp(-s) in the weights
    return float((weights * survival_N * density_N).sum())

"""One call of `rejection` or `block` for arbitrary laws, integrated over its noise.

The unit cube of a row's uniforms is cut at thresholds that are computed here, independently: p / q for each draft token
(or the chances of `block`), the cumulative weights of p or max(p - q, 0) for the draw. Inside a cell the outcome must
not change: it is evaluated in the middle and next to every corner. Then the cells' volumes are the outcomes' exact
probabilities.

Shape suffixes: K draft tokens, J = K + 1 uniforms and columns, N cells, P points of a cell, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from math import prod

import numpy as np
import torch
from torch import Tensor

from tests.helpers.laws.enumeration import distance
from tests.helpers.laws.markov import Law
from tests.helpers.samplers import Sampler, native_sampling
from triforce.backends.torch.logits_processor import LogitsProcessor
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import Ints, ints
from triforce.speculation import Draft, SequenceState
from triforce.speculation import verification as couplings

Text = tuple[int, ...]
NextLaw = Callable[[Text], list[float]]
Interval = tuple[float, float]
Decide = Callable[[Draft, Tensor, Tensor], tuple[Tensor, Tensor]]
INSET = 1e-12
PROMPT = (0, 1, 1)


def warped(seed: int, params: SamplingParams, vocab_size: int, likeness: float = 0.0) -> NextLaw:
    """Return random next-token laws by the real processor; a share `likeness` of the logits is equal for all seeds."""

    def next_law(text: Text) -> list[float]:
        own_normals, common = (_normals((s, *text), vocab_size) for s in (seed, 0))
        logits = 2 * ((1 - likeness) * own_normals + likeness * common)
        ids = torch.tensor([[*PROMPT, *text]])
        return (
            LogitsProcessor([params], [len(PROMPT)], vocab_size)(logits[None, None], ids, torch.tensor([ids.shape[1]]))
            .flatten()
            .tolist()
        )

    return next_law


def _normals(key: tuple[int, ...], n: int) -> Tensor:
    seed = sum((k + 1) * 31**i for i, k in enumerate(key))
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Cell:
    draft_tokens: Text
    weight: float  # probability of the draft, times the cell's volume
    edges: list[Interval]  # for the draw, then for each draft token


Cut = Callable[[NextLaw, NextLaw, Text], Iterator[list[Interval]]]
"""Yields the edges of the cells of a draft: for the draw, then for each of its tokens."""


def cells(p: NextLaw, q: NextLaw, count: int, cut: Cut) -> Iterator[Cell]:
    """Yield all cells of positive volume, for drafts of `count` tokens, each drawn from q."""
    for draft_tokens in product(range(len(q(()))), repeat=count):
        weight = prod(q(draft_tokens[:j])[token] for j, token in enumerate(draft_tokens))
        for edges in cut(p, q, draft_tokens) if weight else ():
            if volume := prod(high - low for low, high in edges):
                yield Cell(draft_tokens, weight * volume, edges)


def one_by_one(p: NextLaw, q: NextLaw, draft_tokens: Text) -> Iterator[list[Interval]]:
    """A token is accepted below p / q; the draw is from p, or from max(p - q, 0) after a rejection."""
    count = len(draft_tokens)
    thresholds = [
        min(1.0, p(draft_tokens[:j])[token] / q(draft_tokens[:j])[token]) for j, token in enumerate(draft_tokens)
    ]
    for accepted in range(count + 1):
        judged = [(0.0, a) for a in thresholds[:accepted]] + [(a, 1.0) for a in thresholds[accepted : accepted + 1]]
        judged += [(0.0, 1.0)] * (count - len(judged))
        for drawn in draws(residual_of(1.0, p, q, draft_tokens, accepted)):
            yield [drawn, *judged]


def as_a_block(p: NextLaw, q: NextLaw, draft_tokens: Text) -> Iterator[list[Interval]]:
    """The last token below its threshold is accepted with all before it (Sun et al. 2024, equations 3 and 4)."""
    count = len(draft_tokens)
    reaches = reaches_of(p, q, draft_tokens)
    residuals = [residual_of(reach, p, q, draft_tokens, accepted) for accepted, reach in enumerate(reaches)]
    chances = [
        sum(residual) and sum(residual) / (sum(residual) + (1 - reach))
        for residual, reach in zip(residuals, reaches, strict=True)
    ]
    for passed in product((False, True), repeat=count):
        accepted = max((j for j in range(1, count + 1) if passed[j - 1]), default=0)
        judged = [(0.0, a) if ok else (a, 1.0) for ok, a in zip(passed, chances[1:], strict=True)]
        for drawn in draws(residuals[accepted]):
            yield [drawn, *judged]


def reaches_of(p: NextLaw, q: NextLaw, draft_tokens: Text) -> list[float]:
    """Return the chances that a block accepts at least 0, 1, ... of these draft tokens, given their proposal."""
    ratios = (p(draft_tokens[:j])[token] / q(draft_tokens[:j])[token] for j, token in enumerate(draft_tokens))
    return [*accumulate(ratios, lambda reach, ratio: min(1.0, reach * ratio), initial=1.0)]


def residual_of(reach: float, p: NextLaw, q: NextLaw, draft_tokens: Text, accepted: int) -> list[float]:
    """Return max(reach p - q, 0) after the accepted draft tokens; q = 0 after the last one."""
    proposal_law = q(draft_tokens[:accepted]) if accepted < len(draft_tokens) else [0.0] * len(p(()))
    return [max(reach * a - b, 0.0) for a, b in zip(p(draft_tokens[:accepted]), proposal_law, strict=True)]


def draws(law: list[float]) -> list[Interval]:
    """Return the interval of [0, 1) of each token, by weights."""
    return list(pairwise([0.0, *(total / sum(law) for total in accumulate(law))])) if sum(law) else []


class Given:
    """Noise that returns given uniforms for any call."""

    def __init__(self, uniforms_BJ: Tensor) -> None:
        self.uniforms_BJ = uniforms_BJ

    def uniforms(self, tier: int, n: int, used_B: Ints) -> Tensor:
        return self.uniforms_BJ


def in_torch(draft: Draft, probs_BJV: Tensor, uniforms_BJ: Tensor) -> tuple[Tensor, Tensor]:
    """Decide by `rejection`, looked up at the call, as a mutant may replace it."""
    return couplings.rejection(draft, probs_BJV, uniforms_BJ)


def block_in_torch(draft: Draft, probs_BJV: Tensor, uniforms_BJ: Tensor) -> tuple[Tensor, Tensor]:
    """Decide by `block`, looked up at the call."""
    return couplings.block(draft, probs_BJV, uniforms_BJ)


def native(draft: Draft, probs_BJV: Tensor, uniforms_BJ: Tensor) -> tuple[Tensor, Tensor]:
    """Decide by the native sampler's `rejection`."""
    return fused(native_sampling, draft, probs_BJV, uniforms_BJ)


def native_block(draft: Draft, probs_BJV: Tensor, uniforms_BJ: Tensor) -> tuple[Tensor, Tensor]:
    """Decide by the native sampler's `block`."""
    return fused(native_sampling, draft, probs_BJV, uniforms_BJ, couplings.BlockRejection)


def fused(
    sampler: Sampler,
    draft: Draft,
    probs_BJV: Tensor,
    uniforms_BJ: Tensor,
    coupling: type[couplings.Rejection] = couplings.Rejection,
) -> tuple[Tensor, Tensor]:
    """Decide by a fused sampler's coupling, from logits that are the logarithms of the laws."""
    B, _, V = probs_BJV.shape
    sampling = sampler([SamplingParams()] * B, [0] * B, V, coupling(Given(uniforms_BJ)))
    prefix = SequenceState(np.zeros((B, 1), dtype=np.int64), np.zeros(B, dtype=np.int64))
    step = sampling.verify(draft, probs_BJV.log(), prefix, np.ones(B, dtype=np.bool_), 0)
    kept_B = step.counts_B - 1
    return torch.from_numpy(kept_B), torch.from_numpy(step.tokens_BK[np.arange(B), kept_B])


def outcomes(p: NextLaw, q: NextLaw, counts: Sequence[int], decide: Decide = in_torch) -> list[tuple[int, Cell, Text]]:
    """Return the emitted tokens of each cell, for drafts of each of `counts`, all in one ragged batch."""
    cut = as_a_block if decide in (block_in_torch, native_block) else one_by_one
    listed = [(count, cell) for count in counts for cell in cells(p, q, count, cut)]
    draft, laws_p = batch(p, q, listed, max(counts))
    uniforms_NPJ = looks([cell.edges for _, cell in listed], max(counts) + 1)
    N, P, J = uniforms_NPJ.shape
    tokens, origins, counts_B = (x.repeat(P, 0) for x in (draft.tokens_BK, draft.origins_BK, draft.counts_B))
    repeated_draft = Draft(tokens, draft.probs_BKV.repeat_interleave(P, 0), origins, counts_B)
    decided = decide(repeated_draft, laws_p.repeat_interleave(P, 0), uniforms_NPJ.reshape(N * P, J))
    accepted_NP, token = (x.view(N, P) for x in decided)
    assert (accepted_NP == accepted_NP[:, :1]).all(), "the number of accepted tokens changes inside a cell"
    assert (token == token[:, :1]).all(), "the token drawn changes inside a cell"
    emitted = zip(listed, accepted_NP[:, 0].tolist(), token[:, 0].tolist(), strict=True)
    return [(count, cell, (*cell.draft_tokens[:k], t)) for (count, cell), k, t in emitted]


def batch(p: NextLaw, q: NextLaw, listed: list[tuple[int, Cell]], K: int) -> tuple[Draft, Tensor]:
    """Return the draft tokens of all cells as one draft, and the laws that judge them; padding is random."""
    V = len(p(()))
    generator = torch.Generator().manual_seed(5)
    counts_B = ints([count for count, _ in listed])
    tokens_BK = torch.randint(V, (len(listed), K), generator=generator).numpy()
    laws_q, laws_p = torch.rand(2, len(listed), K + 1, V, generator=generator, dtype=torch.float64)
    for b, (count, cell) in enumerate(listed):
        tokens_BK[b, :count] = cell.draft_tokens
        for j in range(count + 1):
            laws_p[b, j] = torch.tensor(p(cell.draft_tokens[:j]), dtype=torch.float64)
            if j < count:
                laws_q[b, j] = torch.tensor(q(cell.draft_tokens[:j]), dtype=torch.float64)
    return Draft(tokens_BK, laws_q[:, :K], np.zeros_like(tokens_BK), counts_B), laws_p


def looks(edges: list[list[Interval]], J: int) -> Tensor:
    """Return points next to every corner of each cell, and its middle: (N, P, J). Unused uniforms take all values."""
    unit_interval = (0.0, 1.0)
    edges_NJ2 = torch.tensor([e + [unit_interval] * (J - len(e)) for e in edges], dtype=torch.float64)
    corners_PJ = torch.tensor([*product(unit_interval, repeat=J), (0.5,) * J], dtype=torch.float64)
    low_N1J, high_N1J = edges_NJ2[:, None].unbind(-1)
    assert (high_N1J - low_N1J > 4 * INSET).all(), "choose other laws: a cell is too narrow to look into"
    return low_N1J + INSET + corners_PJ * (high_N1J - low_N1J - 2 * INSET)


def emitted_laws(p: NextLaw, q: NextLaw, counts: Sequence[int], decide: Decide = in_torch) -> dict[int, Law]:
    """Return for each count the law of `max(counts) + 1` tokens: the emitted ones, continued by p."""
    laws: dict[int, Law] = {count: defaultdict(float) for count in counts}
    for count, cell, text in outcomes(p, q, counts, decide):
        for full_text, weight in continued(p, text, cell.weight, max(counts) + 1).items():
            laws[count][full_text] += weight
    return laws


def continued(p: NextLaw, text: Text, weight: float, length: int) -> Law:
    """Return the law of texts of `length` tokens that begin with `text` and go on by p."""
    growing = {text: weight}
    for _ in range(length - len(text)):
        growing = {(*t, v): w * x for t, w in growing.items() for v, x in enumerate(p(t))}
    return growing


def deviation(p: NextLaw, q: NextLaw, counts: tuple[int, ...], decide: Decide = in_torch) -> float:
    """Return the largest total variation, over all counts, of the emitted tokens, continued by p, from p."""
    truth = continued(p, (), 1.0, max(counts) + 1)
    return max(distance(law, truth) for law in emitted_laws(p, q, counts, decide).values())


def kept(p: NextLaw, q: NextLaw, counts: Sequence[int], decide: Decide = in_torch) -> dict[int, list[float]]:
    """Return for each count the probability that at least 1, 2, ... draft tokens are accepted."""
    chances = {count: [0.0] * count for count in counts}
    for count, cell, text in outcomes(p, q, counts, decide):
        for j in range(len(text) - 1):
            chances[count][j] += cell.weight
    return chances

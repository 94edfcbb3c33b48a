"""One call of `rejection` for arbitrary laws, integrated over its noise.

The unit cube of a row's uniforms is cut at thresholds that are computed here, independently: p / q for each guess, the
cumulative weights of p or max(p - q, 0) for the draw. Inside a cell the outcome must not change: it is looked at in the
middle and next to every corner. Then the cells' volumes are the outcomes' exact probabilities.

Shape suffixes: K guesses, J = K + 1 uniforms and columns, N cells, P points of a cell, V vocabulary.
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

from tests.laws.toy import Law
from triforce.request import SamplingParams
from triforce.sampler import NativeSampling
from triforce.sampling import Warper
from triforce.shapes import Ints, ints
from triforce.speculation import Draft, Prefix
from triforce.speculation import coupling as couplings

Text = tuple[int, ...]
NextLaw = Callable[[Text], list[float]]
Interval = tuple[float, float]
Decide = Callable[[Draft, Tensor, Tensor], tuple[Tensor, Tensor]]
INSET = 1e-12
PROMPT = (0, 1, 1)


def warped(seed: int, params: SamplingParams, vocab_size: int, likeness: float = 0.0) -> NextLaw:
    """Random next-token laws behind the real warper; a share `likeness` of the logits is the same for all seeds."""

    def next_law(text: Text) -> list[float]:
        own, common = (_normals((s, *text), vocab_size) for s in (seed, 0))
        logits = 2 * ((1 - likeness) * own + likeness * common)
        ids = torch.tensor([[*PROMPT, *text]])
        return (
            Warper([params], [len(PROMPT)], vocab_size)(logits[None, None], ids, torch.tensor([ids.shape[1]]))
            .flatten()
            .tolist()
        )

    return next_law


def _normals(key: tuple[int, ...], n: int) -> Tensor:
    seed = sum((k + 1) * 31**i for i, k in enumerate(key))
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Cell:
    guess: Text
    weight: float  # of the guess, times the cell's volume
    edges: list[Interval]  # of the draw, then of each guess


def cells(p: NextLaw, q: NextLaw, count: int) -> Iterator[Cell]:
    """All cells of positive volume, for drafts of `count` guesses, each drawn from q."""
    for guess in product(range(len(q(()))), repeat=count):
        law_p, law_q = ([law(guess[:j])[token] for j, token in enumerate(guess)] for law in (p, q))
        if not prod(law_q):
            continue
        thresholds = [min(1.0, a / b) for a, b in zip(law_p, law_q, strict=True)]
        for kept in range(count + 1):
            judged = [(0.0, a) for a in thresholds[:kept]] + [(a, 1.0) for a in thresholds[kept : kept + 1]]
            judged += [(0.0, 1.0)] * (count - len(judged))
            for drawn in draws(p(guess[:kept]), q(guess[:kept]) if kept < count else None):
                edges = [drawn, *judged]
                if volume := prod(high - low for low, high in edges):
                    yield Cell(guess, prod(law_q) * volume, edges)


def draws(p: list[float], refused: list[float] | None) -> list[Interval]:
    """The part of [0, 1) of each token drawn from p, or from max(p - q, 0) after a refusal."""
    owed = [max(a - b, 0.0) for a, b in zip(p, refused, strict=True)] if refused else p
    borders = [0.0, *(total / sum(owed) for total in accumulate(owed))] if sum(owed) else []
    return list(pairwise(borders))


class Given:
    """These uniforms, whatever is asked for."""

    def __init__(self, uniforms_BJ: Tensor) -> None:
        self.uniforms_BJ = uniforms_BJ

    def uniforms(self, tier: int, n: int, used_B: Ints) -> Tensor:
        return self.uniforms_BJ


def in_torch(draft: Draft, probs_BJV: Tensor, uniforms_BJ: Tensor) -> tuple[Tensor, Tensor]:
    """Looked up when called: mutants.py may have replaced it."""
    return couplings.rejection(draft, probs_BJV, uniforms_BJ)


def native(draft: Draft, probs_BJV: Tensor, uniforms_BJ: Tensor) -> tuple[Tensor, Tensor]:
    """`rejection` as the native sampler decides, from logits that are the logarithms of these laws."""
    B, _, V = probs_BJV.shape
    sampling = NativeSampling([SamplingParams()] * B, [0] * B, V, couplings.Rejection(Given(uniforms_BJ)))
    prefix = Prefix(np.zeros((B, 1), dtype=np.int64), np.zeros(B, dtype=np.int64))
    step = sampling.verify(draft, probs_BJV.log(), prefix, np.ones(B, dtype=np.bool_), 0)
    kept_B = step.counts_B - 1
    return torch.from_numpy(kept_B), torch.from_numpy(step.tokens_BK[np.arange(B), kept_B])


def outcomes(p: NextLaw, q: NextLaw, counts: Sequence[int], decide: Decide = in_torch) -> list[tuple[int, Cell, Text]]:
    """What `rejection` emits in each cell, for drafts of each of these counts, all in one ragged batch."""
    listed = [(count, cell) for count in counts for cell in cells(p, q, count)]
    draft, laws_p = batch(p, q, listed, max(counts))
    uniforms_NPJ = looks([cell.edges for _, cell in listed], max(counts) + 1)
    N, P, J = uniforms_NPJ.shape
    tokens, origins, counts_B = (x.repeat(P, 0) for x in (draft.tokens_BK, draft.origins_BK, draft.counts_B))
    many = Draft(tokens, draft.laws_BKV.repeat_interleave(P, 0), origins, counts_B)
    decided = decide(many, laws_p.repeat_interleave(P, 0), uniforms_NPJ.reshape(N * P, J))
    kept, token = (x.view(N, P) for x in decided)
    assert (kept == kept[:, :1]).all(), "the number of guesses kept changes inside a cell"
    assert (token == token[:, :1]).all(), "the token drawn changes inside a cell"
    emitted = zip(listed, kept[:, 0].tolist(), token[:, 0].tolist(), strict=True)
    return [(count, cell, (*cell.guess[:k], t)) for (count, cell), k, t in emitted]


def batch(p: NextLaw, q: NextLaw, listed: list[tuple[int, Cell]], K: int) -> tuple[Draft, Tensor]:
    """The guesses of all cells as one draft, and the laws that judge them; what pads them is noise."""
    V, generator = len(p(())), torch.Generator().manual_seed(5)
    counts_B = ints([count for count, _ in listed])
    tokens_BK = torch.randint(V, (len(listed), K), generator=generator).numpy()
    laws_q, laws_p = torch.rand(2, len(listed), K + 1, V, generator=generator, dtype=torch.float64)
    for b, (count, cell) in enumerate(listed):
        tokens_BK[b, :count] = cell.guess
        for j in range(count + 1):
            laws_p[b, j] = torch.tensor(p(cell.guess[:j]), dtype=torch.float64)
            if j < count:
                laws_q[b, j] = torch.tensor(q(cell.guess[:j]), dtype=torch.float64)
    return Draft(tokens_BK, laws_q[:, :K], np.zeros_like(tokens_BK), counts_B), laws_p


def looks(edges: list[list[Interval]], J: int) -> Tensor:
    """Points next to every corner of each cell, and its middle: (N, P, J). Unused uniforms take all their values."""
    whole = (0.0, 1.0)
    edges_NJ2 = torch.tensor([e + [whole] * (J - len(e)) for e in edges], dtype=torch.float64)
    corners_PJ = torch.tensor([*product(whole, repeat=J), (0.5,) * J], dtype=torch.float64)
    low_N1J, high_N1J = edges_NJ2[:, None].unbind(-1)
    assert (high_N1J - low_N1J > 4 * INSET).all(), "choose other laws: a cell is too narrow to look into"
    return low_N1J + INSET + corners_PJ * (high_N1J - low_N1J - 2 * INSET)


def emitted_laws(p: NextLaw, q: NextLaw, counts: Sequence[int], decide: Decide = in_torch) -> dict[int, Law]:
    """For each count, the law of `max(counts) + 1` tokens: what `rejection` emits, continued by p."""
    laws: dict[int, Law] = {count: defaultdict(float) for count in counts}
    for count, cell, text in outcomes(p, q, counts, decide):
        for whole, weight in continued(p, text, cell.weight, max(counts) + 1).items():
            laws[count][whole] += weight
    return laws


def continued(p: NextLaw, text: Text, weight: float, length: int) -> Law:
    """The law of texts of `length` tokens that begin with `text` and go on by p."""
    growing = {text: weight}
    for _ in range(length - len(text)):
        growing = {(*t, v): w * x for t, w in growing.items() for v, x in enumerate(p(t))}
    return growing


def acceptance(p: NextLaw, q: NextLaw, counts: Sequence[int]) -> dict[int, float]:
    """For each count above 0, the probability that the first guess is kept."""
    first: dict[int, float] = defaultdict(float)
    for count, cell, text in outcomes(p, q, counts):
        first[count] += cell.weight * (len(text) > 1)
    return {count: first[count] for count in counts if count}

"""Enumeration of all branches of tiers of Markov chains, through the real decision code, with their probabilities.

A chain reads its context from its memory of the tokens it was fed, not from the text, so a memory that is not rewound
is a wrong law. Its laws lie on a palette for which a few cells have every threshold of a decision (p / q, and the
cumulative weights of p and of max(p - q, 0)) on their borders: then their midpoints integrate each uniform exactly, and
the law of the text over all strings of cells is exact. Equal branches are merged after each proposal of the top tier.

Shape suffixes: B branches, S text capacity, T tokens fed, J columns, V vocabulary, D digits (cells, in order of use),
R roles of uniforms, C cells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.helpers.laws.markov import PLAIN, POISON, Branches, Cells, Chain, Grid, Law, Memory
from tests.helpers.samplers import torch_sampling
from triforce.engine.sequence import TokenSequence
from triforce.interface.sampling_params import SamplingParams
from triforce.speculation import NgramProposer, Proposer, SequenceState, Tier, TokenSampler
from triforce.speculation import verification as couplings


@dataclass(frozen=True)
class TierStack:
    """Tiers from the lowest to the full one: its logits and its gamma. A lookup tier has no logits.

    `selects`: the first index of the lowest tier's table is the top tier's glance.
    """

    tiers: list[tuple[Tensor | None, int]]
    cells: Cells = ((0.5, 0.5),)
    params: SamplingParams = PLAIN
    prompt: tuple[int, ...] = (0, 1)
    selects: bool = False
    noise: Callable[[Tensor, Cells], Grid] = Grid
    coupling: type = couplings.Rejection
    sampler: Callable[..., TokenSampler] = torch_sampling

    @property
    def vocab_size(self) -> int:
        return self.tiers[-1][0].shape[-1]

    def build(self, branches: Branches) -> Proposer:
        memories = list(branches.memories)
        below = None
        for level, (table, gamma) in enumerate(self.tiers):
            if table is None:
                below = NgramProposer(len(branches.ids_BS), gamma, below, min_match=1)
                continue
            watched = branches.memories[-1] if self.selects and level == 0 else None
            below = Tier(f"tier {level}", Chain(table, watched), memories.pop(0), gamma, below)
        return below

    def play(self, branches: Branches, noise: object) -> Branches:
        """Run one proposal of the top tier, as `SequenceBatch.step` does."""
        rows = len(branches.ids_BS)
        coupling = self.coupling(noise)
        prompts = [len(self.prompt)] * rows
        sampling = self.sampler([self.params] * rows, prompts, self.vocab_size, coupling)
        prefix = SequenceState(branches.ids_BS.numpy(), branches.lengths_B.numpy())
        proposed = prefix.append(self.build(branches).propose(prefix, sampling, branches.live_B.numpy()))
        lengths_B = torch.from_numpy(proposed.lengths_B)
        return Branches(branches.ids_BS, lengths_B, branches.memories, branches.live_B, branches.weights_B)

    def start(self, horizon: int, branches: int = 1) -> Branches:
        reach = sum(gamma for _, gamma in self.tiers) + len(self.tiers)
        ids_BS = torch.full((branches, len(self.prompt) + horizon + reach + 1), POISON)
        ids_BS[:, : len(self.prompt)] = torch.tensor(self.prompt)
        seen_B = torch.full((branches,), len(self.prompt) - 1)
        models = sum(table is not None for table, _ in self.tiers)
        memories = [Memory(ids_BS.clone(), seen_B.clone(), torch.zeros_like(seen_B)) for _ in range(models)]
        weights_B = torch.full((branches,), 1 / branches, dtype=torch.float64)
        return Branches(ids_BS, seen_B + 1, memories, torch.ones(branches, dtype=torch.bool), weights_B)

    def sequence(self, branches: Branches, b: int, horizon: int, stop: frozenset[int]) -> TokenSequence:
        """Return a real sequence for the tokens of a branch: it ends at a stop token, or at the horizon."""
        sequence = TokenSequence(list(self.prompt), self.params, seed=0, stop_ids=stop)
        tokens = branches.ids_BS[b, len(self.prompt) : int(branches.lengths_B[b])].tolist()
        sequence.accept(tokens, [""] * len(tokens), horizon)
        return sequence


def expand(stack: TierStack, branches: Branches) -> Branches:
    """Return all outcomes of one proposal from every branch. A string of digits that is too short is extended."""
    of_B = torch.arange(len(branches.ids_BS))
    digits_BD = torch.zeros(len(branches.ids_BS), 0, dtype=torch.long)
    chances_B = torch.ones(len(of_B), dtype=torch.float64)
    ended = []
    while len(of_B):
        noise = stack.noise(digits_BD, stack.cells)
        played = stack.play(branches.pick(of_B), noise)
        played.weights_B = played.weights_B * chances_B
        short_B = noise.used_B > digits_BD.shape[1]
        ended.append(played.pick((~short_B).nonzero()[:, 0]).merged() if not short_B.all() else played.pick(of_B[:0]))
        roles_B = noise.missing_B[short_B]
        sizes_B = noise.sizes_R[roles_B]
        of_B, digits_BD, chances_B, roles_B = (
            x.repeat_interleave(sizes_B, 0) for x in (of_B[short_B], digits_BD[short_B], chances_B[short_B], roles_B)
        )
        digit_B = torch.arange(len(of_B)) - (sizes_B.cumsum(0) - sizes_B).repeat_interleave(sizes_B)
        digits_BD = torch.cat([digits_BD, digit_B[:, None]], 1)
        chances_B = chances_B * noise.widths_RC[roles_B, digit_B]
    return joined(ended).merged()


def joined(parts: list[Branches]) -> Branches:
    memories = [
        Memory(*(torch.cat([getattr(m, name) for m in ms]) for name in ("ids_BS", "seen_B", "glance_B")))
        for ms in zip(*(part.memories for part in parts), strict=True)
    ]
    ids_BS, lengths_B, live_B, weights_B = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("ids_BS", "lengths_B", "live_B", "weights_B")
    )
    return Branches(ids_BS, lengths_B, memories, live_B, weights_B)


def law(stack: TierStack, horizon: int, stop: frozenset[int] = frozenset()) -> Law:
    """Return the exact law of a stack's text."""
    branches = stack.start(horizon)
    while branches.live_B.any():
        branches = expand(stack, branches)
        sequences = [stack.sequence(branches, b, horizon, stop) for b in range(len(branches.ids_BS))]
        branches.live_B = torch.tensor([sequence.finish_reason is None for sequence in sequences])
    texts: Law = defaultdict(float)
    for sequence, weight in zip(sequences, branches.weights_B.tolist(), strict=True):
        texts[tuple(sequence.tokens)] += weight
    return texts


def chain_law(
    next_law: Callable[[tuple[int, ...]], list[float]], horizon: int, stop: frozenset[int] = frozenset()
) -> Law:
    """Return the law of texts whose next token follows `next_law` of the new tokens so far."""
    ended: Law = {}
    growing: Law = {(): 1.0}
    while growing:
        longer = {
            (*text, v): weight * p for text, weight in growing.items() for v, p in enumerate(next_law(text)) if p > 0
        }
        ended |= {text: weight for text, weight in longer.items() if len(text) == horizon or text[-1] in stop}
        growing = {text: weight for text, weight in longer.items() if text not in ended}
    return ended


def distance(a: Law, b: Law) -> float:
    """Return the largest difference of a probability."""
    return max(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in a.keys() | b.keys())

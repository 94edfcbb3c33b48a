"""Every way that tiers of Markov chains can go, through the real decision code, and its probability.

A chain reads its context from its memory of the tokens it was fed, not from the text, so a memory that is not rewound
is a wrong law. Its laws lie on a palette for which a few cells have every threshold of a decision (p / q, and the
cumulative weights of p and of max(p - q, 0)) on their borders: then their midpoints integrate each uniform exactly, and
the law of the text over all strings of cells is exact. Equal worlds are merged after each proposal of the top tier.

Shape suffixes: B worlds, S text capacity, T tokens fed, J columns, V vocabulary, D digits (cells, in order of use),
R roles of uniforms, C cells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.helpers.laws.markov import PLAIN, POISON, Cells, Chain, Grid, Law, Memory, Worlds
from tests.helpers.samplers import torch_sampling
from triforce.engine.sequence import TokenSequence
from triforce.interface.sampling_params import SamplingParams
from triforce.speculation import NgramProposer, Proposer, SequenceState, Tier, TokenSampler
from triforce.speculation import verification as couplings


@dataclass(frozen=True)
class Ladder:
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

    def build(self, worlds: Worlds) -> Proposer:
        memories, below = list(worlds.memories), None
        for level, (table, gamma) in enumerate(self.tiers):
            if table is None:
                below = NgramProposer(len(worlds.ids_BS), gamma, below, least=1)
                continue
            watched = worlds.memories[-1] if self.selects and level == 0 else None
            below = Tier(f"tier {level}", Chain(table, watched), memories.pop(0), gamma, below)
        return below

    def play(self, worlds: Worlds, noise: object) -> Worlds:
        """One proposal of the top tier, as `engine.Batch.step` makes it."""
        rows = len(worlds.ids_BS)
        coupling, prompts = self.coupling(noise), [len(self.prompt)] * rows
        sampling = self.sampler([self.params] * rows, prompts, self.vocab_size, coupling)
        prefix = SequenceState(worlds.ids_BS.numpy(), worlds.lengths_B.numpy())
        after = prefix.append(self.build(worlds).propose(prefix, sampling, worlds.live_B.numpy()))
        lengths_B = torch.from_numpy(after.lengths_B)
        return Worlds(worlds.ids_BS, lengths_B, worlds.memories, worlds.live_B, worlds.weights_B)

    def start(self, horizon: int, worlds: int = 1) -> Worlds:
        reach = sum(gamma for _, gamma in self.tiers) + len(self.tiers)
        ids_BS = torch.full((worlds, len(self.prompt) + horizon + reach + 1), POISON)
        ids_BS[:, : len(self.prompt)] = torch.tensor(self.prompt)
        seen_B = torch.full((worlds,), len(self.prompt) - 1)
        models = sum(table is not None for table, _ in self.tiers)
        memories = [Memory(ids_BS.clone(), seen_B.clone(), torch.zeros_like(seen_B)) for _ in range(models)]
        weights_B = torch.full((worlds,), 1 / worlds, dtype=torch.float64)
        return Worlds(ids_BS, seen_B + 1, memories, torch.ones(worlds, dtype=torch.bool), weights_B)

    def job(self, worlds: Worlds, b: int, horizon: int, stop: frozenset[int]) -> TokenSequence:
        """The real job that takes the tokens of a world: it ends at a stop token, or at the horizon."""
        job = TokenSequence(list(self.prompt), self.params, seed=0, stop_ids=stop)
        tokens = worlds.ids_BS[b, len(self.prompt) : int(worlds.lengths_B[b])].tolist()
        job.accept(tokens, [""] * len(tokens), horizon)
        return job


def branch(ladder: Ladder, worlds: Worlds) -> Worlds:
    """Every way one proposal can go from every world: a string of digits that proves too short gets longer."""
    of_B, digits_BD = torch.arange(len(worlds.ids_BS)), torch.zeros(len(worlds.ids_BS), 0, dtype=torch.long)
    chances_B, ended = torch.ones(len(of_B), dtype=torch.float64), []
    while len(of_B):
        noise = ladder.noise(digits_BD, ladder.cells)
        after = ladder.play(worlds.pick(of_B), noise)
        after.weights_B = after.weights_B * chances_B
        short_B = noise.used_B > digits_BD.shape[1]
        ended.append(after.pick((~short_B).nonzero()[:, 0]).merged() if not short_B.all() else after.pick(of_B[:0]))
        roles_B = noise.missing_B[short_B]
        sizes_B = noise.sizes_R[roles_B]
        of_B, digits_BD, chances_B, roles_B = (
            x.repeat_interleave(sizes_B, 0) for x in (of_B[short_B], digits_BD[short_B], chances_B[short_B], roles_B)
        )
        digit_B = torch.arange(len(of_B)) - (sizes_B.cumsum(0) - sizes_B).repeat_interleave(sizes_B)
        digits_BD = torch.cat([digits_BD, digit_B[:, None]], 1)
        chances_B = chances_B * noise.widths_RC[roles_B, digit_B]
    return joined(ended).merged()


def joined(parts: list[Worlds]) -> Worlds:
    memories = [
        Memory(*(torch.cat([getattr(m, name) for m in ms]) for name in ("ids_BS", "seen_B", "glance_B")))
        for ms in zip(*(part.memories for part in parts), strict=True)
    ]
    ids_BS, lengths_B, live_B, weights_B = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("ids_BS", "lengths_B", "live_B", "weights_B")
    )
    return Worlds(ids_BS, lengths_B, memories, live_B, weights_B)


def law(ladder: Ladder, horizon: int, stop: frozenset[int] = frozenset()) -> Law:
    """The exact law of the text that a ladder makes."""
    worlds = ladder.start(horizon)
    while worlds.live_B.any():
        worlds = branch(ladder, worlds)
        jobs = [ladder.job(worlds, b, horizon, stop) for b in range(len(worlds.ids_BS))]
        worlds.live_B = torch.tensor([job.finish is None for job in jobs])
    texts: Law = defaultdict(float)
    for job, weight in zip(jobs, worlds.weights_B.tolist(), strict=True):
        texts[tuple(job.tokens)] += weight
    return texts


def chain_law(
    next_law: Callable[[tuple[int, ...]], list[float]], horizon: int, stop: frozenset[int] = frozenset()
) -> Law:
    """The law of texts whose next token follows `next_law` of the new tokens so far."""
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
    """The largest difference of a probability."""
    return max(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in a.keys() | b.keys())

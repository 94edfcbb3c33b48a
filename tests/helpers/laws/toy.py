"""Worlds small enough to be counted: every way a ladder of Markov chains can go, through the real decision code.

A chain reads its context from its memory of the tokens it was fed, not from the text, so a memory that is not rewound
is a wrong law. Its laws lie on a palette for which a few cells have every threshold of a decision (p / q, and the
cumulative weights of p and of max(p - q, 0)) on their borders: then their midpoints integrate each uniform exactly, and
the law of the text over all strings of cells is exact. Equal worlds are merged after each proposal of the top tier.

Shape suffixes: B worlds, S text capacity, T tokens fed, J columns, V vocabulary, D digits (cells, in order of use),
R roles of uniforms, C cells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.helpers.samplers import torch_sampling
from triforce.engine.sequence import TokenSequence
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import Ints
from triforce.speculation import NgramProposer, Proposer, SequenceState, Tier, TokenSampler
from triforce.speculation import verification as couplings

Law = dict[tuple[int, ...], float]
PLAIN = SamplingParams()
POISON = 1
"""Forgotten ids become this between proposals: nobody may read them."""


def columns(start_B: Tensor, width: int) -> Tensor:
    return start_B[:, None] + torch.arange(width)


@dataclass
class Memory:
    """The toy of a KV cache. `glance_B` is the last token fed in the last pass, even if it was refused since."""

    ids_BS: Tensor
    seen_B: Tensor
    glance_B: Tensor

    @property
    def lengths_B(self) -> Ints:
        return self.seen_B.numpy()

    def begin(self, counts_B: Ints, width: int) -> None:
        self.counts_B = torch.from_numpy(counts_B)

    def feed(self, ids_BT: Tensor) -> None:
        width, scratch = ids_BT.shape[1], self.ids_BS.shape[1] - 1
        fed_BT = columns(torch.zeros_like(self.counts_B), width) < self.counts_B[:, None]
        self.ids_BS.scatter_(1, torch.where(fed_BT, columns(self.seen_B, width), scratch), ids_BT)
        last_B = ids_BT.gather(1, (self.counts_B - 1).clamp_min(0)[:, None])[:, 0]
        self.glance_B = torch.where(self.counts_B > 0, last_B, self.glance_B)

    def advance(self, counts_B: Ints) -> None:
        self.seen_B = self.seen_B + torch.from_numpy(counts_B)

    def rewind(self, lengths_B: Ints) -> None:
        self.seen_B = torch.minimum(self.seen_B, torch.from_numpy(lengths_B))

    def pick(self, at_N: Tensor) -> Memory:
        return Memory(self.ids_BS[at_N], self.seen_B[at_N], self.glance_B[at_N])


class Chain:
    """Logits after the last tokens seen: `table` is (V, ..., V). With `watched`, the first index is its glance."""

    def __init__(self, table: Tensor, watched: Memory | None = None) -> None:
        self.table, self.watched = table, watched

    def __call__(self, ids_BT: Tensor, memory: Memory, at_BJ: Tensor) -> Tensor:
        memory.feed(ids_BT)
        at_BJ = memory.seen_B[:, None] + at_BJ
        order = self.table.dim() - 1 - (self.watched is not None)
        context = [memory.ids_BS.gather(1, (at_BJ - back).clamp_min(0)) for back in reversed(range(order))]
        glance = [self.watched.glance_B[:, None].expand_as(at_BJ)] if self.watched else []
        return self.table[tuple(glance + context)]


Cells = Sequence[Sequence[float]]
"""Their widths, for each role of a uniform: to draw with, or to judge a guess by (see `palette.cells_of`)."""


class Grid:
    """Uniforms at the midpoints of cells: a world's next draw, whichever tier makes it, takes its next digit."""

    def __init__(self, digits_BD: Tensor, cells: Cells) -> None:
        self.digits_BD = digits_BD
        self.used_B = torch.zeros(len(digits_BD), dtype=torch.long)
        self.missing_B = torch.zeros_like(self.used_B)  # the role of the first digit beyond those there are
        self.widths_RC = pad_sequence([torch.tensor(widths, dtype=torch.float64) for widths in cells], True)
        self.sizes_R = torch.tensor([len(widths) for widths in cells])

    def uniforms(self, tier: int, n: int, used_B: Ints) -> Tensor:
        roles_n, beyond_B = torch.arange(n).clamp_max(len(self.sizes_R) - 1), self.digits_BD.shape[1] - self.used_B
        wanted_B = (beyond_B >= 0) & (beyond_B < torch.from_numpy(used_B))
        self.missing_B = torch.where(wanted_B, roles_n[beyond_B.clamp(0, n - 1)], self.missing_B)
        at_Bn = columns(self.used_B, n).clamp_max(self.digits_BD.shape[1])
        self.used_B = self.used_B + torch.from_numpy(used_B)
        digits_Bn = F.pad(self.digits_BD, (0, 1)).gather(1, at_Bn)  # what is not enumerated yet is 0, see `branch`
        return (self.widths_RC.cumsum(1) - self.widths_RC / 2)[roles_n, digits_Bn]


@dataclass
class Worlds:
    """What distinguishes worlds between two proposals, and their probabilities."""

    ids_BS: Tensor
    lengths_B: Tensor
    memories: list[Memory]
    live_B: Tensor
    weights_B: Tensor

    def pick(self, at_N: Tensor) -> Worlds:
        memories = [memory.pick(at_N) for memory in self.memories]
        return Worlds(self.ids_BS[at_N], self.lengths_B[at_N], memories, self.live_B[at_N], self.weights_B[at_N])

    def merged(self) -> Worlds:
        """Equal worlds are one, of their total weight."""
        parts = [(self.ids_BS, self.lengths_B), *((memory.ids_BS, memory.seen_B) for memory in self.memories)]
        for ids_BS, lengths_B in parts:
            ids_BS.masked_fill_(columns(torch.zeros_like(lengths_B), ids_BS.shape[1]) >= lengths_B[:, None], POISON)
        glances = [memory.glance_B[:, None] for memory in self.memories]
        key_BX = torch.cat([*(torch.cat([ids, lengths[:, None]], 1) for ids, lengths in parts), *glances], 1)
        salt_X = torch.randint(-(2**62), 2**62, (key_BX.shape[1],), generator=torch.Generator().manual_seed(7))
        _, group_B = (key_BX * salt_X).sum(1).unique(return_inverse=True)
        one_N = torch.zeros(int(group_B.max()) + 1, dtype=torch.long).scatter_(0, group_B, torch.arange(len(group_B)))
        worlds = self.pick(one_N)
        worlds.weights_B = torch.zeros(len(one_N), dtype=torch.float64).index_add_(0, group_B, self.weights_B)
        return worlds


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

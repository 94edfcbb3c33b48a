"""Markov chains as models, with a toy KV cache, and noise that takes each of a few values in turn.

Shape suffixes as in enumeration.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from triforce.arrays import on_device
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import Ints

Law = dict[tuple[int, ...], float]
PLAIN = SamplingParams()
POISON = 1
"""Value of rewound ids between proposals, which no tier may read."""


def columns(start_B: Tensor, width: int) -> Tensor:
    return start_B[:, None] + torch.arange(width)


@dataclass
class Memory:
    """A toy KV cache. `glance_B` is the last token fed in the last pass, even if it was rejected since."""

    ids_BS: Tensor
    seen_B: Tensor
    glance_B: Tensor

    @property
    def lengths_B(self) -> Ints:
        return self.seen_B.numpy()

    def feed(self, ids_BT: Tensor, counts_B: Tensor) -> None:
        width, scratch = ids_BT.shape[1], self.ids_BS.shape[1] - 1
        fed_BT = columns(torch.zeros_like(counts_B), width) < counts_B[:, None]
        self.ids_BS.scatter_(1, torch.where(fed_BT, columns(self.seen_B, width), scratch), ids_BT)
        last_B = ids_BT.gather(1, (counts_B - 1).clamp_min(0)[:, None])[:, 0]
        self.glance_B = torch.where(counts_B > 0, last_B, self.glance_B)
        self.seen_B = self.seen_B + counts_B

    def rewind(self, lengths_B: Ints) -> None:
        self.seen_B = torch.minimum(self.seen_B, torch.from_numpy(lengths_B))

    def pick(self, at_N: Tensor) -> Memory:
        return Memory(self.ids_BS[at_N], self.seen_B[at_N], self.glance_B[at_N])


class Chain:
    """Logits after the last tokens seen: `table` is (V, ..., V). With `watched`, its glance is the first index."""

    def __init__(self, table: Tensor, watched: Memory | None = None) -> None:
        self.table, self.watched = table, watched

    def __call__(self, ids_BT: Ints, counts_B: Ints, memory: Memory, at_BJ: Ints) -> Tensor:
        place_BJ = memory.seen_B[:, None] + on_device(at_BJ, "cpu")
        memory.feed(on_device(ids_BT, "cpu"), on_device(counts_B, "cpu"))
        order = self.table.dim() - 1 - (self.watched is not None)
        context = [memory.ids_BS.gather(1, (place_BJ - back).clamp_min(0)) for back in reversed(range(order))]
        glance = [self.watched.glance_B[:, None].expand_as(place_BJ)] if self.watched else []
        return self.table[tuple(glance + context)]


Cells = Sequence[Sequence[float]]
"""Widths of cells for each role of a uniform: to draw a token, or to judge a draft token (see `palette.cells_of`)."""


class Grid:
    """Uniforms at the midpoints of cells: a branch's next draw, by any tier, takes its next digit."""

    def __init__(self, digits_BD: Tensor, cells: Cells) -> None:
        self.digits_BD = digits_BD
        self.used_B = torch.zeros(len(digits_BD), dtype=torch.long)
        self.missing_B = torch.zeros_like(self.used_B)  # the role of the first missing digit
        self.widths_RC = pad_sequence([torch.tensor(widths, dtype=torch.float64) for widths in cells], True)
        self.sizes_R = torch.tensor([len(widths) for widths in cells])

    def uniforms(self, tier: int, n: int, used_B: Ints) -> Tensor:
        roles_n, beyond_B = torch.arange(n).clamp_max(len(self.sizes_R) - 1), self.digits_BD.shape[1] - self.used_B
        wanted_B = (beyond_B >= 0) & (beyond_B < torch.from_numpy(used_B))
        self.missing_B = torch.where(wanted_B, roles_n[beyond_B.clamp(0, n - 1)], self.missing_B)
        at_Bn = columns(self.used_B, n).clamp_max(self.digits_BD.shape[1])
        self.used_B = self.used_B + torch.from_numpy(used_B)
        digits_Bn = F.pad(self.digits_BD, (0, 1)).gather(1, at_Bn)  # digits not enumerated yet are 0, see `expand`
        return (self.widths_RC.cumsum(1) - self.widths_RC / 2)[roles_n, digits_Bn]


@dataclass
class Branches:
    """Branches' states between two proposals, and their probabilities."""

    ids_BS: Tensor
    lengths_B: Tensor
    memories: list[Memory]
    live_B: Tensor
    weights_B: Tensor

    def pick(self, at_N: Tensor) -> Branches:
        memories = [memory.pick(at_N) for memory in self.memories]
        return Branches(self.ids_BS[at_N], self.lengths_B[at_N], memories, self.live_B[at_N], self.weights_B[at_N])

    def merged(self) -> Branches:
        """Merge equal branches into one with their total weight."""
        parts = [(self.ids_BS, self.lengths_B), *((memory.ids_BS, memory.seen_B) for memory in self.memories)]
        for ids_BS, lengths_B in parts:
            ids_BS.masked_fill_(columns(torch.zeros_like(lengths_B), ids_BS.shape[1]) >= lengths_B[:, None], POISON)
        glances = [memory.glance_B[:, None] for memory in self.memories]
        key_BX = torch.cat([*(torch.cat([ids, lengths[:, None]], 1) for ids, lengths in parts), *glances], 1)
        salt_X = torch.randint(-(2**62), 2**62, (key_BX.shape[1],), generator=torch.Generator().manual_seed(7))
        _, group_B = (key_BX * salt_X).sum(1).unique(return_inverse=True)
        one_N = torch.zeros(int(group_B.max()) + 1, dtype=torch.long).scatter_(0, group_B, torch.arange(len(group_B)))
        branches = self.pick(one_N)
        branches.weights_B = torch.zeros(len(one_N), dtype=torch.float64).index_add_(0, group_B, self.weights_B)
        return branches

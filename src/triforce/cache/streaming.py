"""The draft's view: attention sinks and a sliding window, of constant size (StreamingLLM, Xiao et al. 2024).

Shape suffixes: B rows, T tokens fed in one pass, N = B * T, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from math import ceil, gcd

import torch
from torch import Tensor

from triforce import kernels
from triforce.config import ModelConfig
from triforce.errors import CacheError
from triforce.kernels import PAGE, Lists
from triforce.shapes import columns


class Streaming:
    """Each token sees the first `sinks` tokens and the `window` tokens that end with itself.

    Distances are those of the places in [sinks | window], so that they stay inside the range the draft was trained on:
    among the window they are the true ones, and towards the sinks a query stands at its place. So keys are kept
    rotated by their true position and each query is rotated twice, instead of rotating every key in every pass; what
    a token sees does not depend on how the text was cut into passes. A ring with `slack` slots more than the window
    holds the keys, so that as many refused tokens can be forgotten. A row's sinks and ring lie in pages of its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        sinks: int = 16,
        window: int = 496,
        slack: int = 128,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.sinks, self.window, self.slack = config, sinks, window, slack
        self.rows = range(rows)
        self.unit = gcd(sinks, PAGE)
        self.ring = self.unit * (1 + ceil((window + slack) / self.unit))  # a unit more: lists begin at a whole one
        self.pages = ceil((sinks + self.ring) / PAGE)
        self.memory = kernels.memory(config, rows * self.pages, dtype, device, self.unit)
        self.lengths_B = torch.zeros(rows, dtype=torch.long, device=device)
        self.highest_B = torch.zeros_like(self.lengths_B)

    def begin(self, counts_B: Tensor, width: int) -> None:
        # On the host: a pass of the draft costs less than a dozen operations on tensors would.
        starts, counts, highest = self.lengths_B.tolist(), counts_B.tolist(), self.highest_B.tolist()
        ends = [max(high, start + count) for high, start, count in zip(highest, starts, counts, strict=True)]
        if any(count and end - start > self.slack for start, count, end in zip(starts, counts, ends, strict=True)):
            raise CacheError(
                f"A streaming cache with slack {self.slack} cannot run further ahead of the text; raise `slack`."
            )
        device = self.lengths_B.device
        self.highest_B.copy_(torch.tensor(ends))
        slots = [
            self._slot(b, start + t) if t < count else 0
            for b, start, count in zip(self.rows, starts, counts, strict=True)
            for t in range(width)
        ]
        self._slots_N = torch.tensor(slots, device=device)
        self._lists = self._seen(starts, counts)
        positions_N = columns(self.lengths_B, width).flatten()
        self._rotation = self.config.rope.cos_sin(positions_N)
        self._to_sinks = self.config.rope.cos_sin(positions_N.clamp_max(self.sinks + self.window - 1))

    def attend(self, layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
        q_NHD, k_NGD, v_NGD = (x.flatten(0, 1) for x in (q_BTHD, k_BTGD, v_BTGD))
        q_NHD, q_sinks_NHD = self.memory.write(
            layer, q_NHD, k_NGD, v_NGD, self._rotation, self._slots_N, self._to_sinks
        )
        assert q_sinks_NHD is not None
        turned, to_sinks = q_NHD.view(q_BTHD.shape), q_sinks_NHD.view(q_BTHD.shape)
        return self.memory.attend(layer, turned, self._lists, q_sinks_BTHD=to_sinks)[0]

    def advance(self, counts_B: Tensor) -> None:
        self.lengths_B.add_(counts_B)

    def rewind(self, lengths_B: Tensor) -> None:
        self.lengths_B.copy_(torch.minimum(self.lengths_B, lengths_B))

    def resume(self, length: int) -> tuple[int, int]:
        """Skips what cannot reach the window through any layer: the draft's prefill does not grow with the prompt."""
        seen, highest = int(self.lengths_B), int(self.highest_B)
        if highest - seen > self.slack:  # rewound so far that the window is gone; the sinks never are
            seen = min(seen, self.sinks)
        if seen < self.sinks:
            start, stop = seen, min(self.sinks, length)
        else:
            start = max(seen, length - self.config.layers * self.window)
            stop = min(start + self.slack, length)
        self.lengths_B.fill_(start)
        self.highest_B.fill_(start)
        return start, stop

    def row(self, b: int) -> Streaming:
        one = object.__new__(Streaming)
        one.__dict__.update(self.__dict__)
        one.rows = self.rows[b : b + 1]
        one.lengths_B, one.highest_B = self.lengths_B[b : b + 1], self.highest_B[b : b + 1]
        return one

    def fork(self, source: int, row: int) -> None:
        """Let a row see what another row has seen."""
        size = self.pages * PAGE
        slots_N = torch.arange(size, device=self.lengths_B.device) + (row * self.pages + 1) * PAGE
        for layer in range(self.config.layers):
            self.memory.put(layer, slots_N, *self.memory.run(layer, (source * self.pages + 1) * PAGE, size))
        self.lengths_B[row], self.highest_B[row] = self.lengths_B[source], self.highest_B[source]

    def _slot(self, b: int, position: int) -> int:
        """Where a row keeps the token at a position."""
        place = position if position < self.sinks else self.sinks + (position - self.sinks) % self.ring
        return (b * self.pages + 1) * PAGE + place

    def _seen(self, starts: list[int], counts: list[int]) -> Lists:
        """The sinks, and the stretch of the ring that the queries of each row see: from its oldest unit in sight on."""
        units, unit = [], self.unit
        sinks, ring = self.sinks // unit, self.ring // unit
        dropped = [max(0, start - self.window + 1 - self.sinks) // unit for start in starts]
        for b, start, count, drop in zip(self.rows, starts, counts, dropped, strict=True):
            first = (b * self.pages + 1) * PAGE // unit
            length = ceil((start + count) / unit) - drop - sinks
            units.append([*range(first, first + sinks), *(first + sinks + (drop + i) % ring for i in range(length))])
        most = max(map(len, units))
        padded = torch.tensor([row + [0] * (most - len(row)) for row in units], dtype=torch.int32)
        starts = [start - drop * unit for start, drop in zip(starts, dropped, strict=True)]
        return Lists(padded.to(self.lengths_B.device), starts, counts, unit, self.sinks, self.window)

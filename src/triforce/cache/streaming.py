"""The draft's view: attention sinks and a sliding window, of constant size (StreamingLLM, Xiao et al. 2024).

Shape suffixes: B rows, T tokens fed in one pass, L layers, H query heads, G KV heads, h = H / G, S slots, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triforce.config import ModelConfig
from triforce.errors import CacheError
from triforce.rope import rotate
from triforce.shapes import columns


class Streaming:
    """Each token sees the first `sinks` tokens and the `window` tokens that end with itself.

    Distances are those of the places in [sinks | window], so that they stay inside the range the draft was trained on:
    among the window they are the true ones, and towards the sinks a query stands at its place. So keys are kept
    rotated by their true position and each query is rotated twice, instead of rotating every key in every pass; what
    a token sees does not depend on how the text was cut into passes. A ring with `slack` slots more than the window
    holds the keys, so that as many refused tokens can be forgotten.
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
        slots = sinks + window + slack + 1  # the last is scratch, for padding
        shape = (config.layers, rows, config.kv_heads, slots, config.head_dim)
        self.keys_LBGSD = torch.zeros(shape, dtype=dtype, device=device)
        self.values_LBGSD = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths_B = torch.zeros(rows, dtype=torch.long, device=device)
        self.highest_B = torch.zeros_like(self.lengths_B)

    def begin(self, counts_B: Tensor, width: int) -> None:
        positions_BT = columns(self.lengths_B, width)
        fed_BT = positions_BT < (self.lengths_B + counts_B)[:, None]
        end_B = torch.maximum(self.highest_B, self.lengths_B + counts_B)
        if bool(((end_B - self.lengths_B > self.slack) & (counts_B > 0)).any()):
            raise CacheError(
                f"A streaming cache with slack {self.slack} cannot run further ahead of the text; raise `slack`."
            )
        ring = self.window + self.slack
        ringed_BT = self.sinks + (positions_BT - self.sinks) % ring
        self._slots_BT = torch.where(positions_BT < self.sinks, positions_BT, ringed_BT)
        self._slots_BT = torch.where(fed_BT, self._slots_BT, self.sinks + ring)
        self.highest_B.copy_(end_B)
        self._hidden_BTS = self._hidden(positions_BT, end_B)
        self._rotation = self.config.rope.cos_sin(positions_BT)
        self._to_sinks = self.config.rope.cos_sin(positions_BT.clamp_max(self.sinks + self.window - 1))

    def attend(self, layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
        keys_BGSD, values_BGSD = self.keys_LBGSD[layer], self.values_LBGSD[layer]
        self._write(keys_BGSD, rotate(k_BTGD, self._rotation))
        self._write(values_BGSD, v_BTGD)
        scores_BGhTS = self._scores(rotate(q_BTHD, self._rotation), keys_BGSD)
        scores_BGhTS[..., : self.sinks] = self._scores(rotate(q_BTHD, self._to_sinks), keys_BGSD[:, :, : self.sinks])
        scores_BGhTS.masked_fill_(self._hidden_BTS[:, None, None], -1e30)  # finite: a row of padding sees nothing
        weights_BGhTS = scores_BGhTS.softmax(-1).to(values_BGSD.dtype)
        mixed_BGhTD = torch.matmul(weights_BGhTS, values_BGSD[:, :, None])
        return mixed_BGhTD.flatten(1, 2).transpose(1, 2)

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
        one.keys_LBGSD, one.values_LBGSD = self.keys_LBGSD[:, b : b + 1], self.values_LBGSD[:, b : b + 1]
        one.lengths_B, one.highest_B = self.lengths_B[b : b + 1], self.highest_B[b : b + 1]
        return one

    def fork(self, source: int, row: int) -> None:
        """Let a row see what another row has seen."""
        for memory in (self.keys_LBGSD, self.values_LBGSD):
            memory[:, row] = memory[:, source]
        self.lengths_B[row], self.highest_B[row] = self.lengths_B[source], self.highest_B[source]

    def _write(self, memory_BGSD: Tensor, new_BTGD: Tensor) -> None:
        new_BGTD = new_BTGD.transpose(1, 2)
        memory_BGSD.scatter_(2, self._slots_BT[:, None, :, None].expand_as(new_BGTD), new_BGTD)

    def _scores(self, q_BTHD: Tensor, keys_BGSD: Tensor) -> Tensor:
        q_BGhTD = (q_BTHD * self.config.head_dim**-0.5).transpose(1, 2).unflatten(1, (self.config.kv_heads, -1))
        return torch.matmul(q_BGhTD, keys_BGSD[:, :, None].transpose(-1, -2)).float()

    def _hidden(self, positions_BT: Tensor, end_B: Tensor) -> Tensor:
        """Which slots each query does not see: (B, T, S)."""
        slots_S = torch.arange(self.sinks + self.window + self.slack + 1, device=end_B.device)
        ring = self.window + self.slack
        # The latest position below `end` that falls on a slot of the ring.
        latest_BS = end_B[:, None] - 1 - (end_B[:, None] - 1 - slots_S) % ring
        query_BT1 = positions_BT[..., None]
        in_window_BTS = (latest_BS[:, None] <= query_BT1) & (latest_BS[:, None] > query_BT1 - self.window)
        in_window_BTS &= latest_BS[:, None] >= self.sinks
        in_window_BTS[..., -1] = False
        return ~torch.where(slots_S < self.sinks, slots_S <= query_BT1, in_window_BTS)

"""FeatureMemory: what a feature draft holds of each slot of a page pool, in pages of the same numbers.

So it comes and goes with the pages: whoever shares, copies or drops them need not know of it.
Shape suffixes: N slots, G KV heads, D head size, C hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from triforce.backends import dispatch
from triforce.backends.kernel_api import PAGE
from triforce.backends.torch.kv import allocate
from triforce.model.config import ModelConfig

FEATURES = "draft.keys", "draft.values", "draft.states"
"""Names of `FeatureSlots` in files."""


class FeatureSlots(NamedTuple):
    """Keys and values (G, N, D) of the entries that slots hold, and states (N, C) behind them."""

    keys_GND: Tensor
    values_GND: Tensor
    states_NC: Tensor

    def part(self, some: slice) -> FeatureSlots:
        """Return what some of the slots hold."""
        return FeatureSlots(self.keys_GND[:, some], self.values_GND[:, some], self.states_NC[some])

    def to_host(self) -> FeatureSlots:
        """Return a copy on the host."""
        return FeatureSlots(*(each.to("cpu", copy=True) for each in self))


class FeatureMemory:
    """One more layer of pages, `kv`, and a state of each slot. config: that layer's shape.

    The state of slot 0 stays zeros: it stands before each text (see `eagle.eagle_draft`).
    """

    def __init__(
        self, config: ModelConfig, pages: int, dtype: torch.dtype, device: torch.device | str, unit: int = PAGE
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.kv = dispatch.memory(config, pages, dtype, device, unit)
        self.unit = unit
        self.states_NC = allocate(((pages + 1) * PAGE, config.hidden_size), dtype, device)
        self.states_NC[:PAGE] = 0
        self.token_bytes = dtype.itemsize * (config.kv_size + config.hidden_size)
        self.bytes = self.token_bytes * len(self.states_NC)

    def shapes(self, slots: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of what so many slots hold."""
        keys = self.config.kv_heads, slots, self.config.head_dim
        return keys, keys, (slots, self.config.hidden_size)

    def read(self, slots_N: Tensor) -> FeatureSlots:
        """Return copies of what slots hold."""
        return FeatureSlots(*self.kv.read(0, slots_N), self.states_NC[slots_N])

    def write(self, slots_N: Tensor, held: FeatureSlots) -> None:
        """Let slots hold it, bit for bit."""
        keys_GND, values_GND, states_NC = (each.to(slots_N.device) for each in held)
        self.kv.write(0, slots_N, keys_GND, values_GND)
        self.states_NC[slots_N] = states_NC

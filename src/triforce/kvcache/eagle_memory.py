"""EagleHeadMemory: KV and states of an EAGLE head for each slot of a page pool, in pages of the same numbers.

So the memory is allocated and freed with the pool's pages: code that shares or drops pages need not know of it.
Shape suffixes: N slots, G KV heads, D head size, C hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from triforce.arrays import Array, DType, itemsize, to_host
from triforce.backends import dispatch
from triforce.backends.kernel_api import PAGE
from triforce.model.config import ModelConfig

EAGLE_TENSORS = "draft.keys", "draft.values", "draft.states"
"""Names of the fields of `EagleHeadSlots` in files."""


class EagleHeadSlots(NamedTuple):
    """Contents of slots: keys and values (G, N, D) of the EAGLE head, and a hidden state of each slot (N, C)."""

    keys_GND: Array
    values_GND: Array
    states_NC: Array

    def part(self, slots: slice) -> EagleHeadSlots:
        """Return the contents of a slice of the slots."""
        return EagleHeadSlots(self.keys_GND[:, slots], self.values_GND[:, slots], self.states_NC[slots])

    def to_host(self) -> EagleHeadSlots:
        """Return a copy on the host."""
        return EagleHeadSlots(*(np.array(to_host(part)) for part in self))


class EagleHeadMemory:
    """One more layer of pages, `kv`, and a state for each slot. config: that layer's shape.

    The state of slot 0 stays zeros: it stands before each text (see `eagle.eagle_draft`).
    """

    def __init__(self, config: ModelConfig, pages: int, dtype: DType, device: str, unit: int = PAGE) -> None:
        self.config = config
        self.dtype = dtype
        self.kv = dispatch.memory(config, pages, dtype, device, unit)
        self.unit = unit
        self.states_NC = self.kv.empty(((pages + 1) * PAGE, config.hidden_size))
        self.states_NC[:PAGE] = 0
        self.token_bytes = itemsize(dtype) * (config.kv_size + config.hidden_size)
        self.bytes = self.token_bytes * len(self.states_NC)

    def shapes(self, slots: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the fields of `EagleHeadSlots` for `slots` slots."""
        keys = self.config.kv_heads, slots, self.config.head_dim
        return keys, keys, (slots, self.config.hidden_size)

    def read(self, slots_N: Array) -> EagleHeadSlots:
        """Return copies of the contents of slots."""
        slots_N = self.kv.array(slots_N)  # the pool's memory may be of other kernels
        return EagleHeadSlots(*self.kv.read(0, slots_N), self.states_NC[slots_N])

    def write(self, slots_N: Array, contents: EagleHeadSlots) -> None:
        """Write the contents of slots, bit for bit."""
        slots_N = self.kv.array(slots_N)
        self.kv.write(0, slots_N, contents.keys_GND, contents.values_GND)
        self.states_NC[slots_N] = self.kv.array(contents.states_NC)

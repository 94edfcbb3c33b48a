"""The contract of kernels for a feature draft: its passes, and the memory that they are handed.

Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from triforce.backends.kernel_api import ForwardBatch, KVBackend
from triforce.ragged import Ints


class EntryMemory(Protocol):
    """The memory of a feature draft, by slots of a pool: entries (one layer's keys and values), and states (slots, C).

    The state of slot 0 is zeros for good: the one before a text.
    """

    kv: KVBackend
    states_NC: Tensor


class FeaturePasses(Protocol):
    """Passes of a feature draft; tensors of ids and columns are on the host."""

    weight_size: int
    """Bytes of a weight as products read it."""

    def forward(self, ids_BT: Tensor, memory: EntryMemory, batch: ForwardBatch, at_BJ: Tensor) -> Tensor:
        """Return logits of columns `at_BJ`, float32 (B, J, V). A row's last output is kept as a state."""

    def note(
        self, ids_N: Tensor, memory: EntryMemory, slots: tuple[Ints, Ints, Ints], columns_N: Ints, states_SBTC: Tensor
    ) -> None:
        """Make states and entries of tokens of the target's pass, which stand at `columns_N` of its rows, flattened.

        slots: positions, own slots, and those before them, (N) each.
        """

"""The EAGLE head as it is handed around: its shape, its weights, and the contract of the kernels that run it.

Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from triforce.backends.kernel_api import ForwardBatch, KVBackend
from triforce.model.config import ModelConfig
from triforce.model.rope import Rope
from triforce.ragged import Ints


@dataclass(frozen=True, slots=True)
class EagleHeadConfig:
    """The shape of one EAGLE head."""

    vocab_size: int
    """Of the target: rows of the embedding that it reads."""
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    state_layers: tuple[int, ...]
    """It reads the residual stream behind so many of the target's layers, in this order."""
    choices: int
    """Tokens that it can propose."""
    rope: Rope
    sinks: int
    window: int
    """Each entry sees the first `sinks` entries and the `window` that end with itself."""
    fc_norm: bool
    """Each state is normed by itself, before they are joined."""
    norm_output: bool
    """The next guess reads the normed output in the place of states, not the residual stream (both EAGLE 3.1)."""
    norm_before_residual: bool
    """The residual stream begins with the normed state."""
    embedding_residual: bool = False
    """And with the normed embedding times a matrix: through attention it comes by the few KV heads only (EAGLE, Li et
    al. 2024, arXiv 2401.15077, joins the two likewise)."""

    @property
    def layer(self) -> ModelConfig:
        """Return the shape of its one layer as KV memory needs it: it proposes what a model of `choices` tokens would.

        It sees a window, wherever that is.
        """
        return ModelConfig(
            self.choices, self.hidden_size, self.intermediate_size, 1, self.heads, self.kv_heads, self.head_dim,
            self.norm_eps, tied=True, context=self.sinks + self.window, rope=self.rope,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class EagleHeadWeights:
    """Tensors of one type on one device; `None` where a draft has none."""

    fc_CX: Tensor
    embedding_norm_C: Tensor
    hidden_norm_C: Tensor
    q_proj_QE: Tensor
    k_proj_PE: Tensor
    v_proj_PE: Tensor
    o_proj_CQ: Tensor
    post_norm_C: Tensor
    gate_proj_IC: Tensor
    up_proj_IC: Tensor
    down_proj_CI: Tensor
    norm_C: Tensor
    tokens_M: Tensor
    """int64, ascending: the tokens that it can propose, by the row of the head."""
    fc_norm_SC: Tensor | None = None
    embedding_proj_CC: Tensor | None = None
    head_MC: Tensor | None = None
    """None: the rows of these tokens in the target's head."""

    def to(self, dtype: torch.dtype, device: torch.device | str) -> EagleHeadWeights:
        """Return the weights as numbers of this type on a device."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {
            name: each.to(device, dtype) for name, each in named.items() if each is not None and name != "tokens_M"
        }
        return replace(self, **moved, tokens_M=self.tokens_M.to(device))

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor that training changes, by its field, in a fixed order."""
        for field in fields(self):
            tensor = getattr(self, field.name)
            if field.name not in ("tokens_M", "head_MC") and tensor is not None:
                yield field.name, tensor


def shapes(config: EagleHeadConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each trained tensor of such a draft, by its field."""
    C = config.hidden_size
    inner = config.intermediate_size
    S = len(config.state_layers)
    Q = config.heads * config.head_dim
    P = config.kv_heads * config.head_dim
    norms = dict.fromkeys(("embedding_norm_C", "hidden_norm_C", "post_norm_C", "norm_C"), (C,))
    found: dict[str, tuple[int, ...]] = {
        "fc_CX": (C, S * C), "q_proj_QE": (Q, 2 * C), "k_proj_PE": (P, 2 * C), "v_proj_PE": (P, 2 * C),
        "o_proj_CQ": (C, Q), "gate_proj_IC": (inner, C), "up_proj_IC": (inner, C), "down_proj_CI": (C, inner),
    }  # fmt: skip
    extra: dict[str, tuple[int, ...]] = {"fc_norm_SC": (S, C)} if config.fc_norm else {}
    return found | norms | extra | ({"embedding_proj_CC": (C, C)} if config.embedding_residual else {})


class EntryMemory(Protocol):
    """The memory of an EAGLE head, by slots of a pool: entries (one layer's keys and values), and states (slots, C).

    The state of slot 0 is zeros for good: the one before a text.
    """

    kv: KVBackend
    states_NC: Tensor


class EagleHeadPasses(Protocol):
    """Passes of an EAGLE head; tensors of ids and columns are on the host."""

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

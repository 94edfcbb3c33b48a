"""The EAGLE head as data: its shape, its weights, and the protocol of the passes that run it.

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
    """Shape of an EAGLE head."""

    vocab_size: int
    """The target's: rows of the embedding that the head reads."""
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    state_layers: tuple[int, ...]
    """Counts of the target's layers behind which the head reads the residual stream, in the order of concatenation."""
    choices: int
    """Count of tokens that the head can propose."""
    rope: Rope
    sinks: int
    window: int
    """Each entry sees the first `sinks` entries and the `window` that end with itself."""
    fc_norm: bool
    """Whether each state is normed before the states are concatenated."""
    norm_output: bool
    """Whether the next draft step reads the normed output as its state, not the residual stream.

    This and `fc_norm` are of EAGLE 3.1."""
    norm_before_residual: bool
    """Whether the residual stream begins with the normed state."""
    embedding_residual: bool = False
    """Whether a projection of the normed embedding is added to the residual stream. Otherwise the embedding passes only
    through attention's few KV heads (EAGLE, Li et al. 2024, arXiv 2401.15077, joins both likewise)."""

    @property
    def layer(self) -> ModelConfig:
        """Return the head's one layer as a model config, as KV memory needs it, with a vocabulary of `choices` tokens.

        Its context is that of the sinks and the window.
        """
        return ModelConfig(
            self.choices, self.hidden_size, self.intermediate_size, 1, self.heads, self.kv_heads, self.head_dim,
            self.norm_eps, tied=True, context=self.sinks + self.window, rope=self.rope,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class EagleHeadWeights:
    """Tensors of an EAGLE head, of one dtype on one device; `None` where a head has none."""

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
    """int64, ascending: the tokens that can be proposed, by row of `head_MC`."""
    fc_norm_SC: Tensor | None = None
    embedding_proj_CC: Tensor | None = None
    head_MC: Tensor | None = None
    """None: the rows of `tokens_M` in the target's output head."""

    def to(self, dtype: torch.dtype, device: torch.device | str) -> EagleHeadWeights:
        """Return the weights in this dtype on a device."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {
            name: tensor.to(device, dtype)
            for name, tensor in named.items()
            if tensor is not None and name != "tokens_M"
        }
        return replace(self, **moved, tokens_M=self.tokens_M.to(device))

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor that training changes, by its field, in a fixed order."""
        for field in fields(self):
            tensor = getattr(self, field.name)
            if field.name not in ("tokens_M", "head_MC") and tensor is not None:
                yield field.name, tensor


def shapes(config: EagleHeadConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each trained tensor of a head, by its field."""
    C = config.hidden_size
    inner = config.intermediate_size
    S = len(config.state_layers)
    Q = config.heads * config.head_dim
    P = config.kv_heads * config.head_dim
    norms = dict.fromkeys(("embedding_norm_C", "hidden_norm_C", "post_norm_C", "norm_C"), (C,))
    matrices: dict[str, tuple[int, ...]] = {
        "fc_CX": (C, S * C), "q_proj_QE": (Q, 2 * C), "k_proj_PE": (P, 2 * C), "v_proj_PE": (P, 2 * C),
        "o_proj_CQ": (C, Q), "gate_proj_IC": (inner, C), "up_proj_IC": (inner, C), "down_proj_CI": (C, inner),
    }  # fmt: skip
    fc_norms: dict[str, tuple[int, ...]] = {"fc_norm_SC": (S, C)} if config.fc_norm else {}
    return matrices | norms | fc_norms | ({"embedding_proj_CC": (C, C)} if config.embedding_residual else {})


class EntryMemory(Protocol):
    """Memory of an EAGLE head by slots of a pool: entries (one layer's keys and values), and states (slots, C).

    The state of slot 0 is always zeros: the one before a text.
    """

    kv: KVBackend
    states_NC: Tensor


class EagleHeadPasses(Protocol):
    """Passes of an EAGLE head. Tensors of ids and columns are on the host."""

    weight_size: int
    """Bytes of a weight as matrix products read it."""

    def forward(self, ids_BT: Tensor, memory: EntryMemory, batch: ForwardBatch, at_BJ: Tensor) -> Tensor:
        """Return logits of columns `at_BJ`, float32 (B, J, V). A row's last output is written as a state."""

    def record_entries(
        self, ids_N: Tensor, memory: EntryMemory, slots: tuple[Ints, Ints, Ints], columns_N: Ints, states_SBTC: Tensor
    ) -> None:
        """Write states and entries of tokens of the target's pass. columns_N: their columns in its flattened rows.

        slots: positions of the tokens, their slots, and the slots of the tokens before them, (N) each.
        """

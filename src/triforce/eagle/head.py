"""The EAGLE head as data: its shape, its weights, and the protocol of the passes that run it.

Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Protocol

from triforce.arrays import Array
from triforce.backends.kernel_api import ForwardBatch, KVBackend
from triforce.model.config import ModelConfig
from triforce.model.rope import Rope
from triforce.ragged import Ints


@dataclass(frozen=True, slots=True)
class EagleHeadConfig:
    """Shape of an EAGLE head."""

    vocab_size: int
    """Vocabulary size of the target: rows of the embedding that the head reads."""
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    state_layers: tuple[int, ...]
    """The head reads the target's residual stream after these counts of layers, in the order of concatenation."""
    draft_vocab_size: int
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
    through attention's few KV heads. The first EAGLE (Li et al. 2024, arXiv 2401.15077) projects it, too."""

    @property
    def layer(self) -> ModelConfig:
        """Return the head's one layer as a model config for its KV memory, with a vocabulary of `draft_vocab_size`.

        The context of this config is as long as the sinks and the window.
        """
        return ModelConfig(
            self.draft_vocab_size, self.hidden_size, self.intermediate_size, 1, self.heads, self.kv_heads,
            self.head_dim, self.norm_eps, tied=True, context=self.sinks + self.window, rope=self.rope,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class EagleHeadWeights:
    """Weights of an EAGLE head, of one dtype: host arrays, or tensors where torch computes; `None` where missing."""

    fc_CX: Array
    embedding_norm_C: Array
    hidden_norm_C: Array
    q_proj_QE: Array
    k_proj_PE: Array
    v_proj_PE: Array
    o_proj_CQ: Array
    post_norm_C: Array
    gate_proj_IC: Array
    up_proj_IC: Array
    down_proj_CI: Array
    norm_C: Array
    tokens_M: Array
    """int64, ascending: the tokens that can be proposed, by row of `head_MC`."""
    fc_norm_SC: Array | None = None
    embedding_proj_CC: Array | None = None
    head_MC: Array | None = None
    """None: the rows of `tokens_M` in the target's output head."""

    def trained_tensors(self) -> Iterator[tuple[str, Array]]:
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

    The state of slot 0 is always zeros: it is the state before the first token of a text.
    """

    kv: KVBackend
    states_NC: Array


class EagleHeadPasses(Protocol):
    """Passes of an EAGLE head. Tensors of ids and columns are on the host."""

    weight_size: int
    """Bytes of a weight as matrix products read it."""

    def forward(self, ids_BT: Array, memory: EntryMemory, batch: ForwardBatch, at_BJ: Array) -> Array:
        """Return logits of columns `at_BJ`, float32 (B, J, V). Each row's last output becomes its last slot's state."""

    def record_entries(
        self, ids_N: Array, memory: EntryMemory, slots: tuple[Ints, Ints, Ints], columns_N: Ints, states_SBTC: Array
    ) -> None:
        """Write states and entries of tokens of the target's pass. columns_N: indices of the tokens in B * T columns.

        slots: positions of the tokens, their slots, and the slots of the tokens before them, (N) each.
        """

"""The shape of a model, as a decoder and its caches need it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from triforce.errors import RequestError, argument
from triforce.model.architecture import LLAMA, Architecture
from triforce.model.rope import Rope

SCALE_BYTES = 2
"""Of int8 KV, behind each token's keys of a head and its values: a scale in bfloat16."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one model, and its arithmetic; built by `hf_config.model_config` from a Hugging Face config."""

    vocab_size: int
    """Real tokens only: padded rows of the embedding and the head are never seen."""
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    """The head is the embedding."""
    context: int
    """Positions the model may see, in tokens."""
    rope: Rope
    architecture: Architecture = LLAMA
    ranks: int = 1
    """Processes that share it: `heads` and `kv_heads` are one's, everything else is the whole model's."""
    kv_int8: bool = False
    """Keys and values are rounded to int8 once, with a scale for each token and head: another model."""
    hadamard: bool = True
    """Of int8 KV: heads are rotated by Hadamard matrices before they are rounded (see `kv_rows.rotated_head`)."""
    positions: int = 0
    """Positions that the model was made for, of which `context` uses some; 0: they are not known."""
    attention_sink_logits_LH: Tensor | None = field(default=None, compare=False, repr=False)
    """The weights that attention needs, as it needs the rotation: see `Architecture.attention_sink_logits`; float32."""

    @property
    def weights_read(self) -> int:
        """Weights that a pass of one token multiplies with: the blocks', and the head's."""
        return self._matrices(self.architecture.experts.read if self.architecture.experts else 1)

    @property
    def parameters(self) -> int:
        """Weights of the whole model, the head counted once where it is the embedding."""
        C, D, parts = self.hidden_size, self.head_dim, self.architecture
        Q, P = self.heads * D * self.ranks, self.kv_heads * D * self.ranks
        norms = {"": 0, "head": 2 * D, "row": Q + P}[parts.qk_norm] + 2 * C * (parts.input_norms + parts.output_norms)
        vectors = (
            norms
            + (Q + 2 * P) * parts.qkv_bias
            + C * parts.o_bias
            + self.heads * self.ranks * parts.attention_sink_logits
        )
        dense, inner, of_experts = self.layers, self.intermediate_size, 0
        if parts.experts:
            dense, inner = parts.dense_layers, parts.dense_size
            of_experts = parts.experts.count * parts.experts.corrected
            of_experts += parts.experts.count * (1 + 2 * self.intermediate_size + C) * parts.experts.biases
        behind = self.layers * vectors + (self.layers - parts.dense_layers) * of_experts
        behind += dense * (2 * inner + C) * parts.mlp_bias
        return self.matrix_weights + self.vocab_size * C * (not self.tied) + behind + C

    @property
    def matrix_weights(self) -> int:
        """Weights of all matrices that some pass multiplies with: the blocks', and the head's."""
        return self._matrices(self.architecture.experts.held if self.architecture.experts else 1)

    def _matrices(self, experts: int) -> int:
        """Weights of all matrices, with so many experts of each layer; the embedding is left out."""
        C, D, parts = self.hidden_size, self.head_dim * self.ranks, self.architecture
        attention = 2 * C * (self.heads + self.kv_heads) * D
        router = C * parts.experts.count if parts.experts else 0
        dense = parts.dense_layers * (3 * C * parts.dense_size - router)
        return self.layers * (attention + router) + dense + experts * self.expert_weights + self.vocab_size * C

    @property
    def expert_weights(self) -> int:
        """Weights of an expert of each layer that has some; of each MLP, where no layer has."""
        return (self.layers - self.architecture.dense_layers) * 3 * self.hidden_size * self.intermediate_size

    @property
    def rotations(self) -> list[int]:
        """The number of each layer's rotation."""
        return [kind.rope for kind in self.architecture.kinds[: self.layers]] or [0] * self.layers

    @property
    def windows(self) -> list[int]:
        """Tokens that a query sees in each layer; 0: all before it, too."""
        return [kind.window for kind in self.architecture.kinds[: self.layers]] or [0] * self.layers

    def kv_read(self, seen: int) -> int:
        """Numbers of KV that a token reads which sees so many others: layers with a window read no more than that."""
        of_layer = self.kv_size // self.layers
        return sum(of_layer * min(seen, window or seen) for window in self.windows)

    @property
    def kv_size(self) -> int:
        """Numbers in the keys and values of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.ranks

    @property
    def row_size(self) -> int:
        """Numbers of a token's keys of a head, or of its values, as memories copy them; int8 with their scale."""
        return self.head_dim + SCALE_BYTES * self.kv_int8

    @property
    def rotates_heads(self) -> bool:
        """Whether keys and values are those of rotated heads."""
        return self.kv_int8 and self.hadamard

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of the keys and values of a token, with so many bytes of a number where they are not int8."""
        return self.kv_size // self.head_dim * self.row_size * (1 if self.kv_int8 else itemsize)

    @property
    def lower_bytes(self) -> float:
        """Bytes of a number of KV, in the mean, that tiers below the full one read of copies or of int8 KV."""
        return (self.head_dim / 2 + SCALE_BYTES) / self.head_dim if self.kv_int8 else 1.0

    def shared(self, ranks: int) -> ModelConfig:
        """Return one process's part of it. Raises RequestError unless KV heads can be dealt out evenly."""
        if self.kv_heads % ranks:
            fit = [str(n) for n in range(1, self.kv_heads + 1) if self.kv_heads % n == 0]
            raise RequestError(
                f"{self.kv_heads} KV heads cannot be shared evenly by {ranks} processes; use {argument('ranks')} "
                f"{' or '.join(fit)}"
            )
        return replace(self, heads=self.heads // ranks, kv_heads=self.kv_heads // ranks, ranks=ranks)

    @property
    def whole(self) -> ModelConfig:
        """The config of the model that ranks share."""
        return replace(self, heads=self.heads * self.ranks, kv_heads=self.kv_heads * self.ranks, ranks=1)

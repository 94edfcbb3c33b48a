"""The shape of a model, as a decoder and its caches need it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from triforce.errors import RequestError
from triforce.model.rope import Rope

SCALE_BYTES = 2
"""Of int8 KV, behind each token's keys of a head and its values: a scale in bfloat16."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one Llama-family model; built by `families.model_config` from a Hugging Face config."""

    vocab_size: int
    """Real tokens only: padded rows of the embedding and the head are never seen."""
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    """RMSNorm on each head of q and k, before the rotation (Qwen3)."""
    tied: bool
    """The head is the embedding."""
    context: int
    """Positions the model may see, in tokens."""
    rope: Rope
    ranks: int = 1
    """Processes that share it: `heads` and `kv_heads` are one's, everything else is the whole model's."""
    kv_int8: bool = False
    """Keys and values are rounded to int8 once, with a scale for each token and head: another model."""

    @property
    def weights_read(self) -> int:
        """Weights that a pass multiplies with: the blocks', and the head's."""
        C, D = self.hidden_size, self.head_dim * self.ranks
        Q, P = self.heads * D, self.kv_heads * D
        return self.layers * (2 * C * (Q + P) + 3 * C * self.intermediate_size) + self.vocab_size * C

    @property
    def parameters(self) -> int:
        """Weights of the whole model, the head counted once where it is the embedding."""
        C, D = self.hidden_size, self.head_dim
        vectors = 2 * C + (self.heads + 2 * self.kv_heads) * D * self.ranks * self.qkv_bias + 2 * D * self.qk_norm
        return self.weights_read + self.vocab_size * C * (not self.tied) + self.layers * vectors + C

    @property
    def kv_size(self) -> int:
        """Numbers in the keys and values of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.ranks

    @property
    def row_size(self) -> int:
        """Numbers of a token's keys of a head, or of its values, as memories copy them; int8 with their scale."""
        return self.head_dim + SCALE_BYTES * self.kv_int8

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of the keys and values of a token, with so many bytes of a number where they are not int8."""
        return self.kv_size // self.head_dim * self.row_size * (1 if self.kv_int8 else itemsize)

    def shared(self, ranks: int) -> ModelConfig:
        """Return one process's part of it. Raises RequestError unless KV heads can be dealt out evenly."""
        if self.kv_heads % ranks:
            fit = [str(n) for n in range(1, self.kv_heads + 1) if self.kv_heads % n == 0]
            raise RequestError(
                f"{self.kv_heads} KV heads cannot be shared evenly by {ranks} processes; use --tp {' or '.join(fit)}"
            )
        return replace(self, heads=self.heads // ranks, kv_heads=self.kv_heads // ranks, ranks=ranks)

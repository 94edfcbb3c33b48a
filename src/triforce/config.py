"""What a decoder and its caches must know about a model."""

from __future__ import annotations

from dataclasses import dataclass

from triforce.rope import Rope


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

    @property
    def weights_read(self) -> int:
        """Weights that a pass multiplies with: the blocks', and the head's."""
        C, Q, P = self.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.layers * (2 * C * (Q + P) + 3 * C * self.intermediate_size) + self.vocab_size * C

    @property
    def kv_size(self) -> int:
        """Numbers in the keys and values of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

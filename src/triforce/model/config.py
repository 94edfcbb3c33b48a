"""ModelConfig: the shape of a model, as a decoder and its caches need it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from triforce.errors import RequestError, argument
from triforce.model.rope import Rope


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Settings in which the layers of one model differ."""

    window: int = 0
    """Sliding window in tokens, the query's own token included; 0: no window."""
    rope: int = 0
    """Index of the layer's rotation among the model's (see `Rope`)."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in the place of an MLP (Shazeer et al. 2017, arXiv 1701.06538).

    A router's `function` turns its logits into scores. A token goes through the `chosen` experts with the best scores;
    among equal scores the lowest expert ids win. The weight of an expert's output is its score times `scale`. With
    `renormalised` the scores of a token's chosen experts are first divided by their sum. A token also goes through
    `shared` experts, whose weights are 1.
    """

    count: int
    """Experts that the router chooses from; ids of shared experts follow."""
    chosen: int
    renormalised: bool
    biases: bool = False
    """Whether the router and each projection have a bias."""
    function: str = field(default="softmax", repr=False)
    """`softmax` over the logits of all experts, or `sigmoid` of each."""
    corrected: bool = field(default=False, repr=False)
    """Whether each expert has a correction, which is added to its score when experts are chosen, not to its weight.

    Corrections balance the load of experts without an auxiliary loss (Wang et al. 2024, arXiv 2408.15664).
    """
    scale: float = field(default=1.0, repr=False)
    groups: int = field(default=1, repr=False)
    """Number of equal groups of consecutive expert ids. Experts are chosen from the best `chosen_groups` groups only.

    The score of a group is the sum of its two best experts' scores.
    """
    chosen_groups: int = field(default=1, repr=False)
    shared: int = field(default=0, repr=False)
    """Number of shared experts, which have no biases.

    Checkpoints hold one wider MLP for all shared experts. Its inner sum splits into this number of experts.
    """

    @property
    def total(self) -> int:
        """Experts of a layer, shared ones included."""
        return self.count + self.shared

    @property
    def active(self) -> int:
        """Experts that one token goes through, shared ones included."""
        return self.chosen + self.shared


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder's arithmetic. The defaults are Llama's."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    """Whether each projection of an MLP has a bias; biases of experts are `Experts.biases`."""
    qk_norm: str = ""
    """RMSNorm of q and k before the rotation: `head` (over each head), `row` (over all heads), or "" (no norm)."""
    rotated: int = 0
    """Number of rotated channels of each head: the first channels in the files' order; 0: all channels."""
    interleaved: bool = False
    """Whether the two channels of a rotated pair are neighbours in the files, not half a head apart."""
    input_norms: bool = True
    """RMSNorm of the inputs of attention and MLP."""
    output_norms: bool = False
    """RMSNorm of the outputs of attention and MLP, before they are added to the residual stream."""
    norm_offset: float = 0.0
    """Offset that is added to the norms' weights of the files."""
    activation: str = "silu"
    """Function of the gate: `silu`, `gelu` (tanh approximation), or `clamped` (gpt-oss, see `clamped_swiglu`)."""
    attention_sink_logits: bool = False
    """Whether each query head has a sink logit: a term of the softmax's denominator without a key or a value."""
    score_cap: float = 0.0
    """Cap of attention scores s, which become cap * tanh(s / cap); 0: no cap."""
    query_scale: float = 1.0
    """Factor of the queries, on top of the usual 1 / sqrt(D) of scores."""
    embedding_scale: float = 1.0
    """Factor of the embedding. The factor itself is rounded to the type of the weights."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual stream."""
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    """Cap of the logits after `logit_scale`; the formula is that of `score_cap`."""
    kinds: tuple[LayerKind, ...] = ()
    """Kind of each layer; empty where all layers are alike, without a window."""
    experts: Experts | None = None
    dense_layers: int = 0
    """Number of leading layers that have an MLP in place of experts."""
    dense_size: int = 0
    """Inner width of the dense layers' MLPs."""

    def kind(self, layer: int) -> LayerKind:
        """Return the kind of a layer."""
        return self.kinds[layer] if self.kinds else LayerKind()

    @property
    def kinds_without_windows(self) -> tuple[LayerKind, ...]:
        """Kinds of the layers without their windows; empty where all layers are then alike."""
        kinds = tuple(LayerKind(rope=kind.rope) for kind in self.kinds)
        return kinds if any(kind.rope for kind in kinds) else ()

    @property
    def has_plain_layers(self) -> bool:
        """Whether layers compute as Llama and Qwen do. The Triton kernels support no other arithmetic."""
        llama = Architecture(qkv_bias=self.qkv_bias, o_bias=self.o_bias, mlp_bias=self.mlp_bias, qk_norm=self.qk_norm)
        return self == llama and self.qk_norm != "row"


LLAMA = Architecture()


SCALE_BYTES = 2
"""Bytes of one bfloat16 scale of int8 KV. A token has two scales per KV head: one for its key, one for its value."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one model, and its arithmetic; built by `hf_config.model_config` from a Hugging Face config."""

    vocab_size: int
    """Real tokens only: padded rows of the embedding and the head are left out."""
    hidden_size: int
    """Channels of the residual stream."""
    intermediate_size: int
    """Inner width of an MLP, or of one expert."""
    layers: int
    """Decoder layers."""
    heads: int
    """Query heads of a layer."""
    kv_heads: int
    """KV heads of a layer, a divisor of `heads`."""
    head_dim: int
    """Channels of a head."""
    norm_eps: float
    """Epsilon of RMSNorm."""
    tied: bool
    """Whether the head is the embedding."""
    context: int
    """Context limit in tokens that this instance uses; at most `positions`."""
    rope: Rope
    """Rotations of queries and keys by position."""
    architecture: Architecture = LLAMA
    """Arithmetic of a layer, by its differences from Llama's."""
    ranks: int = 1
    """Processes that share the model: `heads` and `kv_heads` are one process's, all other fields the whole model's."""
    kv_int8: bool = False
    """Whether keys and values are rounded to int8 once, with a scale for each token and head.

    Rounding changes the target's distribution. Losslessness holds relative to the target with int8 KV.
    """
    hadamard: bool = True
    """Whether Hadamard matrices rotate heads of int8 KV before rounding (see `backends/torch/int8_rows.py`)."""
    int8_inputs: bool = False
    """Whether products with packed o, gate and up projections round their inputs to int8, in place of int16.

    Rounding changes the target's distribution. Losslessness holds relative to the target with int8 inputs.
    """
    positions: int = 0
    """Context limit in tokens that the checkpoint supports; 0: unknown."""
    attention_sink_logits_LH: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    """Sink logits of all layers, float32, if `Architecture.attention_sink_logits`; KV memories read them from here."""

    @property
    def weights_read(self) -> int:
        """Number of weights that a pass of one token multiplies with, in all layers and the head."""
        return self._matrices(self.architecture.experts.active if self.architecture.experts else 1)

    @property
    def parameters(self) -> int:
        """Number of weights of the whole model; a tied head counts once."""
        C = self.hidden_size
        D = self.head_dim
        architecture = self.architecture
        Q = self.heads * D * self.ranks
        P = self.kv_heads * D * self.ranks
        hidden_norms = 2 * (architecture.input_norms + architecture.output_norms)
        norms = {"": 0, "head": 2 * D, "row": Q + P}[architecture.qk_norm] + hidden_norms * C
        vectors = (
            norms
            + (Q + 2 * P) * architecture.qkv_bias
            + C * architecture.o_bias
            + self.heads * self.ranks * architecture.attention_sink_logits
        )
        dense = self.layers
        inner = self.intermediate_size
        expert_vectors = 0
        if experts := architecture.experts:
            dense = architecture.dense_layers
            inner = architecture.dense_size
            expert_vectors = experts.count * experts.corrected
            expert_vectors += experts.count * (1 + 2 * self.intermediate_size + C) * experts.biases
        other_weights = self.layers * vectors + (self.layers - architecture.dense_layers) * expert_vectors
        other_weights += dense * (2 * inner + C) * architecture.mlp_bias
        return self.matrix_weights + self.vocab_size * C * (not self.tied) + other_weights + C

    @property
    def matrix_weights(self) -> int:
        """Number of weights of all matrices that passes multiply with, in all layers and the head."""
        return self._matrices(self.architecture.experts.total if self.architecture.experts else 1)

    def _matrices(self, experts: int) -> int:
        """Return the number of weights of all matrices but the embedding, with `experts` experts in each layer."""
        C = self.hidden_size
        D = self.head_dim * self.ranks
        architecture = self.architecture
        attention = 2 * C * (self.heads + self.kv_heads) * D
        router = C * architecture.experts.count if architecture.experts else 0
        dense = architecture.dense_layers * (3 * C * architecture.dense_size - router)
        return self.layers * (attention + router) + dense + experts * self.expert_weights + self.vocab_size * C

    @property
    def expert_weights(self) -> int:
        """Number of weights of one expert per layer, summed over the layers that have experts.

        Without experts in the model: number of weights of all MLPs.
        """
        return (self.layers - self.architecture.dense_layers) * 3 * self.hidden_size * self.intermediate_size

    @property
    def rotations(self) -> list[int]:
        """Index of each layer's rotation."""
        return [kind.rope for kind in self.architecture.kinds[: self.layers]] or [0] * self.layers

    @property
    def windows(self) -> list[int]:
        """Sliding window of each layer in tokens, the query's own token included; 0: no window."""
        return [kind.window for kind in self.architecture.kinds[: self.layers]] or [0] * self.layers

    def kv_numbers_read(self, visible_tokens: int) -> int:
        """Return how many numbers of KV attention reads for one token after `visible_tokens` tokens.

        A layer with a window reads at most its window.
        """
        layer_kv_size = self.kv_size // self.layers
        return sum(layer_kv_size * min(visible_tokens, window or visible_tokens) for window in self.windows)

    @property
    def kv_size(self) -> int:
        """Count of numbers in the keys and values of a token, over all layers and KV heads."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.ranks

    @property
    def weight_inputs(self) -> str:
        """Name of the type to which products with packed weights round their inputs, in o, gate and up projections."""
        return "int8" if self.int8_inputs else "int16"

    @property
    def row_size(self) -> int:
        """Elements of a row: a token's key of one head, or its value; for int8 KV with the scale's bytes."""
        return self.head_dim + SCALE_BYTES * self.kv_int8

    @property
    def rotates_heads(self) -> bool:
        """Whether Hadamard matrices have rotated the keys and values that KV memory holds."""
        return self.kv_int8 and self.hadamard

    def kv_bytes(self, itemsize: int) -> int:
        """Return the bytes of a token's keys and values. itemsize: bytes per number, unless KV is int8."""
        return self.kv_size // self.head_dim * self.row_size * (1 if self.kv_int8 else itemsize)

    @property
    def lower_number_bytes(self) -> float:
        """Mean bytes per number of KV that a lower tier reads: 1 from int8 copies, about half from int8 KV."""
        return (self.head_dim / 2 + SCALE_BYTES) / self.head_dim if self.kv_int8 else 1.0

    def shard(self, ranks: int) -> ModelConfig:
        """Return one process's config. Raises RequestError unless `ranks` divides the KV heads."""
        if self.kv_heads % ranks:
            divisors = [str(n) for n in range(1, self.kv_heads + 1) if self.kv_heads % n == 0]
            raise RequestError(
                f"{self.kv_heads} KV heads cannot be shared evenly by {ranks} processes; use {argument('ranks')} "
                f"{' or '.join(divisors)}"
            )
        return replace(self, heads=self.heads // ranks, kv_heads=self.kv_heads // ranks, ranks=ranks)

    @property
    def unsharded(self) -> ModelConfig:
        """Config of the whole model that ranks share."""
        return replace(self, heads=self.heads * self.ranks, kv_heads=self.kv_heads * self.ranks, ranks=1)

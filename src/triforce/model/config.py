"""ModelConfig: the shape of a model, as a decoder and its caches need it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from triforce.errors import RequestError, argument
from triforce.model.rope import Rope


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Settings in which the layers of one model differ."""

    window: int = 0
    """Tokens that a query sees, including its own; 0: its own and all earlier ones."""
    rope: int = 0
    """Index of the layer's rotation among the model's (see `Rope`)."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in the place of an MLP (Shazeer et al. 2017, arXiv 1701.06538).

    A router's `function` turns its logits into scores. A token goes through the `chosen` experts of the best scores,
    among equals the lowest ids, and their scores, times `scale`, are the weights of their outputs. `renormalised`:
    scores are divided by their sum first. A token also goes through `shared` experts, whose weights are 1.
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
    """Whether each expert has a correction that is added to its score for the choice of experts only.

    Such a bias balances the load without an auxiliary loss (Wang et al. 2024, arXiv 2408.15664).
    """
    scale: float = field(default=1.0, repr=False)
    groups: int = field(default=1, repr=False)
    """Equal groups of consecutive expert ids. Only the `chosen_groups` groups with the best two experts count."""
    chosen_groups: int = field(default=1, repr=False)
    shared: int = field(default=0, repr=False)
    """Shared experts: an MLP beside the experts counts as this many, as its inner sum splits up; without biases."""

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
    """RMSNorm of q and k before the rotation: of each `head`, of the whole `row`, or none."""
    rotated: int = 0
    """Rotated channels of each head, the first ones in the files; 0: all channels."""
    interleaved: bool = False
    """Whether the two channels of a rotated pair are neighbours in the files, not half a head apart."""
    input_norms: bool = True
    """RMSNorm of the inputs of attention and MLP."""
    output_norms: bool = False
    """RMSNorm of the outputs of attention and MLP, before they are added to the residual stream."""
    norm_offset: float = 0.0
    """Offset that is added to the norms' weights of the files."""
    activation: str = "silu"
    """Gate's function: `silu`, `gelu` by tanh, or `clamped`, which bounds the up projection, too (`clamped_swiglu`)."""
    attention_sink_logits: bool = False
    """Whether each query head has a logit beside those of keys, which takes weight from them and has no value."""
    score_cap: float = 0.0
    """Cap of attention scores s, which become cap * tanh(s / cap); 0: no cap."""
    query_scale: float = 1.0
    """Factor of the queries, on top of the usual 1 / sqrt(D) of scores."""
    embedding_scale: float = 1.0
    """Factor of the embedding, rounded to the type of the weights."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual stream."""
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    """Cap of the logits, as `score_cap`, after their scale."""
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
    def rotations_only(self) -> tuple[LayerKind, ...]:
        """Kinds of the layers without their windows; empty where all layers are then alike."""
        kinds = tuple(LayerKind(rope=kind.rope) for kind in self.kinds)
        return kinds if any(kind.rope for kind in kinds) else ()

    @property
    def is_baseline(self) -> bool:
        """Whether the arithmetic is Llama's or Qwen's, the only ones that GPU kernels support yet."""
        llama = Architecture(qkv_bias=self.qkv_bias, o_bias=self.o_bias, mlp_bias=self.mlp_bias, qk_norm=self.qk_norm)
        return self == llama and self.qk_norm != "row"


LLAMA = Architecture()


SCALE_BYTES = 2
"""Bytes of the bfloat16 scale that follows each token's keys of a head, and its values, in int8 KV."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one model, and its arithmetic; built by `hf_config.model_config` from a Hugging Face config."""

    vocab_size: int
    """Real tokens only: padded rows of the embedding and the head are left out."""
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    """Whether the head is the embedding."""
    context: int
    """Most positions that the model may use, in tokens."""
    rope: Rope
    architecture: Architecture = LLAMA
    ranks: int = 1
    """Processes that share the model: `heads` and `kv_heads` are one process's, all other fields the whole model's."""
    kv_int8: bool = False
    """Whether keys and values are rounded to int8 once, with a scale for each token and head: another model."""
    hadamard: bool = True
    """Whether Hadamard matrices rotate heads of int8 KV before rounding (see `kv_rows.rotated_head`)."""
    positions: int = 0
    """Positions that the model was trained for; `context` is the part in use. 0: unknown."""
    attention_sink_logits_LH: Tensor | None = field(default=None, compare=False, repr=False)
    """Sink logits, which attention needs as it needs the rotation: `Architecture.attention_sink_logits`; float32."""

    @property
    def weights_read(self) -> int:
        """Weights that a pass of one token multiplies with, of blocks and head."""
        return self._matrices(self.architecture.experts.active if self.architecture.experts else 1)

    @property
    def parameters(self) -> int:
        """Weights of the whole model; a tied head counts once."""
        C = self.hidden_size
        D = self.head_dim
        parts = self.architecture
        Q = self.heads * D * self.ranks
        P = self.kv_heads * D * self.ranks
        norms = {"": 0, "head": 2 * D, "row": Q + P}[parts.qk_norm] + 2 * C * (parts.input_norms + parts.output_norms)
        vectors = (
            norms
            + (Q + 2 * P) * parts.qkv_bias
            + C * parts.o_bias
            + self.heads * self.ranks * parts.attention_sink_logits
        )
        dense = self.layers
        inner = self.intermediate_size
        of_experts = 0
        if parts.experts:
            dense = parts.dense_layers
            inner = parts.dense_size
            of_experts = parts.experts.count * parts.experts.corrected
            of_experts += parts.experts.count * (1 + 2 * self.intermediate_size + C) * parts.experts.biases
        other_weights = self.layers * vectors + (self.layers - parts.dense_layers) * of_experts
        other_weights += dense * (2 * inner + C) * parts.mlp_bias
        return self.matrix_weights + self.vocab_size * C * (not self.tied) + other_weights + C

    @property
    def matrix_weights(self) -> int:
        """Weights of all matrices that passes multiply with, of blocks and head."""
        return self._matrices(self.architecture.experts.total if self.architecture.experts else 1)

    def _matrices(self, experts: int) -> int:
        """Return the weights of all matrices, with `experts` experts in each layer; without the embedding."""
        C = self.hidden_size
        D = self.head_dim * self.ranks
        parts = self.architecture
        attention = 2 * C * (self.heads + self.kv_heads) * D
        router = C * parts.experts.count if parts.experts else 0
        dense = parts.dense_layers * (3 * C * parts.dense_size - router)
        return self.layers * (attention + router) + dense + experts * self.expert_weights + self.vocab_size * C

    @property
    def expert_weights(self) -> int:
        """Weights of one expert in each layer that has experts, summed; of all MLPs where no layer has experts."""
        return (self.layers - self.architecture.dense_layers) * 3 * self.hidden_size * self.intermediate_size

    @property
    def rotations(self) -> list[int]:
        """Index of each layer's rotation."""
        return [kind.rope for kind in self.architecture.kinds[: self.layers]] or [0] * self.layers

    @property
    def windows(self) -> list[int]:
        """Tokens that a query sees in each layer, its own included; 0: all earlier ones, too."""
        return [kind.window for kind in self.architecture.kinds[: self.layers]] or [0] * self.layers

    def kv_read(self, visible_tokens: int) -> int:
        """Return the numbers of KV that a token with `visible_tokens` before it reads; a window bounds its layers."""
        of_layer = self.kv_size // self.layers
        return sum(of_layer * min(visible_tokens, window or visible_tokens) for window in self.windows)

    @property
    def kv_size(self) -> int:
        """Numbers in the keys and values of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.ranks

    @property
    def row_size(self) -> int:
        """Numbers of a row: a token's keys of a head, or its values, as memories copy them; int8 with their scale."""
        return self.head_dim + SCALE_BYTES * self.kv_int8

    @property
    def rotates_heads(self) -> bool:
        """Whether memory holds keys and values of rotated heads."""
        return self.kv_int8 and self.hadamard

    def kv_bytes(self, itemsize: int) -> int:
        """Return the bytes of a token's keys and values, with `itemsize` bytes a number where KV is not int8."""
        return self.kv_size // self.head_dim * self.row_size * (1 if self.kv_int8 else itemsize)

    @property
    def lower_bytes(self) -> float:
        """Mean bytes of a number of KV that tiers below the full one read, of copies or of int8 KV."""
        return (self.head_dim / 2 + SCALE_BYTES) / self.head_dim if self.kv_int8 else 1.0

    def shard(self, ranks: int) -> ModelConfig:
        """Return one process's config. Raises RequestError unless `ranks` divides the KV heads."""
        if self.kv_heads % ranks:
            fit = [str(n) for n in range(1, self.kv_heads + 1) if self.kv_heads % n == 0]
            raise RequestError(
                f"{self.kv_heads} KV heads cannot be shared evenly by {ranks} processes; use {argument('ranks')} "
                f"{' or '.join(fit)}"
            )
        return replace(self, heads=self.heads // ranks, kv_heads=self.kv_heads // ranks, ranks=ranks)

    @property
    def unsharded(self) -> ModelConfig:
        """Config of the whole model that ranks share."""
        return replace(self, heads=self.heads * self.ranks, kv_heads=self.kv_heads * self.ranks, ranks=1)

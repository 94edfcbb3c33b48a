"""The shape of a model, as a decoder and its caches need it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from triforce.errors import RequestError, argument
from triforce.model.rope import Rope


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The part in which the layers of one model differ."""

    window: int = 0
    """Tokens that a query sees, its own among them; 0: all before it, too."""
    rope: int = 0
    """The number of its rotation among the model's (see `Rope`)."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in the place of an MLP (Shazeer et al. 2017, arXiv 1701.06538).

    A router's `function` makes scores of its logits. A token goes through the `chosen` experts of the best scores,
    among equals those of the lowest ids, and their scores, times `scale`, are the weights of their outputs.
    `renormalised`: they are divided by their sum first. It also goes through `shared` experts, whose weights are 1.
    """

    count: int
    """Experts that the router chooses from; the ids of shared ones come behind theirs."""
    chosen: int
    renormalised: bool
    biases: bool = False
    """Whether the router and each projection have one."""
    function: str = field(default="softmax", repr=False)
    """`softmax` over the logits of all experts, or `sigmoid` of each."""
    corrected: bool = field(default=False, repr=False)
    """Whether each expert has a number that is added to its score where experts are chosen, and only there.

    Such a bias spreads the load without a loss of its own (Wang et al. 2024, arXiv 2408.15664).
    """
    scale: float = field(default=1.0, repr=False)
    groups: int = field(default=1, repr=False)
    """Equal parts of the experts, by their ids, of which the best `chosen_groups` count: by their two best experts."""
    chosen_groups: int = field(default=1, repr=False)
    shared: int = field(default=0, repr=False)
    """An MLP beside the experts is that many of them, as a sum over its inner numbers has parts; without biases."""

    @property
    def held(self) -> int:
        """Experts of a layer."""
        return self.count + self.shared

    @property
    def read(self) -> int:
        """Experts that one token goes through."""
        return self.chosen + self.shared


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder's arithmetic. Without arguments it is Llama's."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    """Whether each projection of an MLP has one; those of experts may have their own, see `Experts.biases`."""
    qk_norm: str = ""
    """RMSNorm of q and k before the rotation: of each `head`, of the whole `row`, or none."""
    rotated: int = 0
    """Channels of each head, its first ones in the files, that are rotated; 0: all."""
    interleaved: bool = False
    """Whether the files have the two channels of a rotated pair beside each other, and not half a head apart."""
    input_norms: bool = True
    """RMSNorm of what attention and MLP read."""
    output_norms: bool = False
    """RMSNorm of what they give, before it is added to the residual stream."""
    norm_offset: float = 0.0
    """What is added to the weights of norms as the files have them."""
    activation: str = "silu"
    """Of the gate: `silu`, `gelu` by its tanh, or `clamped`, which bounds the up projection, too (`clamped_swiglu`)."""
    attention_sink_logits: bool = False
    """Whether each query head has a logit beside those of keys, which takes weight from them and has no value."""
    score_cap: float = 0.0
    """Scores s of attention become cap * tanh(s / cap); 0: they stay."""
    query_scale: float = 1.0
    """Factor of the queries, by which scores differ from q k / sqrt(D)."""
    embedding_scale: float = 1.0
    """Factor of the embedding, rounded to the type of the weights."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the residual stream."""
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    """As `score_cap`, of the logits, after their scale."""
    kinds: tuple[LayerKind, ...] = ()
    """Of each layer; none where all are alike, without a window."""
    experts: Experts | None = None
    dense_layers: int = 0
    """The first layers, which have an MLP in the place of experts."""
    dense_size: int = 0
    """The inner width of their MLPs."""

    def kind(self, layer: int) -> LayerKind:
        """Return the kind of a layer."""
        return self.kinds[layer] if self.kinds else LayerKind()

    @property
    def rotations_only(self) -> tuple[LayerKind, ...]:
        """The kinds of layers without their windows; none where all are then alike."""
        kinds = tuple(LayerKind(rope=kind.rope) for kind in self.kinds)
        return kinds if any(kind.rope for kind in kinds) else ()

    @property
    def plain(self) -> bool:
        """Whether it is Llama's or Qwen's: kernels of a GPU know no other yet."""
        llama = Architecture(qkv_bias=self.qkv_bias, o_bias=self.o_bias, mlp_bias=self.mlp_bias, qk_norm=self.qk_norm)
        return self == llama and self.qk_norm != "row"


LLAMA = Architecture()


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
        """Weights of all matrices that some pass multiplies with: the blocks', and the head's."""
        return self._matrices(self.architecture.experts.held if self.architecture.experts else 1)

    def _matrices(self, experts: int) -> int:
        """Weights of all matrices, with so many experts of each layer; the embedding is left out."""
        C = self.hidden_size
        D = self.head_dim * self.ranks
        parts = self.architecture
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

    def kv_read(self, visible_tokens: int) -> int:
        """Numbers of KV that a token reads which sees so many others: layers with a window read no more than that."""
        of_layer = self.kv_size // self.layers
        return sum(of_layer * min(visible_tokens, window or visible_tokens) for window in self.windows)

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

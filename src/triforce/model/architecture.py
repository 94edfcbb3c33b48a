"""The parts in which decoders of different families differ: norms, rotations, windows, scalings, experts.

A family's file maps its config to one of these descriptions. What computes goes by the description alone, and knows
no family's name.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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

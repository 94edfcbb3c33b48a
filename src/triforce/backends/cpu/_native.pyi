# Generated from csrc/ by scripts/native_stub.py: do not edit.

"""
CPU kernels of triforce. A row's result depends on that row alone, bit for bit.
"""

from collections.abc import Sequence
from typing import overload

import numpy
import numpy.typing
import torch

import triforce.model.weights


def levels() -> list[str]:
    """Instruction-set levels that this CPU can run, slowest first."""

def level() -> str:
    """The level in use."""

def use(level: str) -> None:
    """
    Use one level from now on; ValueError if it is unknown or this CPU cannot run it.
    """

def threads() -> int:
    """The number of threads of a kernel."""

def set_threads(count: int) -> None:
    """Set the number of threads; ValueError below 1."""

def usable_cpus() -> int:
    """
    The CPUs that this process may use: those of its affinity, or its control groups' quota where that is less.
    """

def cpu_quota(root: str = '') -> int | None:
    """
    The CPUs' worth of time that its control groups grant it, rounded up, or None without a limit. `root` is where /proc
    and /sys lie.
    """

class Matrix:
    """
    Weights (outputs, inputs) bfloat16, float32 or of a GGUF type, packed for the kernels; rounded to 8 or 4 bits if
    those are given.
    """

    def __init__(self, weight: torch.Tensor | triforce.model.weights.QuantizedWeight, *, bits: int = 0) -> None: ...

    @property
    def bytes(self) -> int:
        """Size of the packed weights."""

    def linear(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """
        Write y = x W^T: x (rows, inputs) of the type that the weights had, or of that of a GGUF weight's inputs, y
        (rows, outputs) float32.
        """

    def rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """
        Write rows `ids` (count) int64 of the weight to out (count, inputs) float32.
        """

class Embedding:
    """
    What tokens begin with: rows of a table (V, C), as its file has it, borrowed, or of a packed matrix, times `scale`.
    """

    @overload
    def __init__(self, matrix: Matrix, scale: float = 1.0) -> None: ...

    @overload
    def __init__(self, table: torch.Tensor | triforce.model.weights.QuantizedWeight, scale: float = 1.0) -> None: ...

    def rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Write rows `ids` (count) int64 to out (count, C) float32."""

class ExpertChoices:
    """Of each expert the rows that go through it, with its weights."""

    @property
    def touched(self) -> int:
        """How many experts the first 8 rows go through together."""

class Experts:
    """
    The experts of a layer, or some outputs of each of their matrices.

    Those that the router has no outputs for are shared by all rows. How it chooses: see `model.architecture.Experts`.
    """

    def __init__(self, post_norm: torch.Tensor | None, *, router: torch.Tensor, gate_projs: Sequence[object], up_projs: Sequence[object], down_projs: Sequence[object], router_bias: torch.Tensor | None = None, correction: torch.Tensor | None = None, gate_biases: Sequence[object] = [], up_biases: Sequence[object] = [], down_biases: Sequence[object] = [], eps: float, bits: int = 0, activation: str = 'silu', chosen: int, sigmoid: bool = False, renormalised: bool = False, scale: float = 1.0, groups: int = 1, chosen_groups: int = 1) -> None: ...

    @property
    def stride(self) -> int:
        """Outputs of a gate projection, up to a multiple of 16."""

    def gate(self, x: torch.Tensor, gated: torch.Tensor) -> ExpertChoices:
        """
        Choose K experts for each row of x (N, hidden) float32, shared ones among them, and write the first half of each
        to `gated` (N * K, stride), expert after expert.
        """

    def down(self, choices: ExpertChoices, gated: torch.Tensor, sum: torch.Tensor) -> None:
        """
        Write what chosen experts give, weighted, to `sum` (N, outputs) float32: of `gated` (N * K, inputs), whose rows
        have zeros up to a multiple of 16.
        """

class QkvProjections:
    """
    The query, key and value projections of a layer, for some of its heads.
    """

    def __init__(self, input_norm: torch.Tensor | None, q_proj: torch.Tensor | triforce.model.weights.QuantizedWeight, k_proj: torch.Tensor | triforce.model.weights.QuantizedWeight, v_proj: torch.Tensor | triforce.model.weights.QuantizedWeight, q_bias: torch.Tensor | None, k_bias: torch.Tensor | None, v_bias: torch.Tensor | None, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, *, head_dim: int, eps: float, bits: int = 0, query_scale: float = 1.0) -> None: ...

    def qkv(self, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """
        Write q (N, H * D), k and v (N, G * D), not rotated, of x (N, C); all are float32.
        """

class DecoderLayer(QkvProjections):
    """A decoder layer but for rotation and attention."""

    def __init__(self, input_norm: torch.Tensor | None, q_proj: torch.Tensor | triforce.model.weights.QuantizedWeight, k_proj: torch.Tensor | triforce.model.weights.QuantizedWeight, v_proj: torch.Tensor | triforce.model.weights.QuantizedWeight, o_proj: torch.Tensor | triforce.model.weights.QuantizedWeight, post_norm: torch.Tensor | None, gate_proj: torch.Tensor | triforce.model.weights.QuantizedWeight | None, up_proj: torch.Tensor | triforce.model.weights.QuantizedWeight | None, down_proj: torch.Tensor | triforce.model.weights.QuantizedWeight | None, q_bias: torch.Tensor | None, k_bias: torch.Tensor | None, v_bias: torch.Tensor | None, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, *, attn_out_norm: torch.Tensor | None = None, mlp_out_norm: torch.Tensor | None = None, o_bias: torch.Tensor | None = None, gate_bias: torch.Tensor | None = None, up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None, experts: Experts | None = None, head_dim: int, eps: float, bits: int = 0, query_scale: float = 1.0, residual_scale: float = 1.0, activation: str = 'silu') -> None: ...

    @property
    def bytes(self) -> int:
        """Size of the packed weights."""

    def finish(self, x: torch.Tensor, attn_out: torch.Tensor) -> int:
        """
        Add the output projection of attention, `attn_out` (N, H * D), and then the MLP to x (N, C) float32.

        Returns how many experts the first tokens, at most 8, go through together; 0 without experts.
        """

class GatedMlp:
    """The first half of an MLP, or some of its outputs."""

    def __init__(self, post_norm: torch.Tensor | None, gate_proj: torch.Tensor | triforce.model.weights.QuantizedWeight, up_proj: torch.Tensor | triforce.model.weights.QuantizedWeight, gate_bias: torch.Tensor | None = None, up_bias: torch.Tensor | None = None, *, eps: float, bits: int = 0, activation: str = 'silu') -> None: ...

    @property
    def stride(self) -> int:
        """Outputs, up to a multiple of 16."""

    def forward(self, x: torch.Tensor, gated: torch.Tensor) -> None:
        """
        Write the activation of gate and up of the normed x (rows, hidden) float32 to `gated` (rows, stride).
        """

class Norm:
    """An RMSNorm of rows."""

    def __init__(self, weight: torch.Tensor, *, eps: float) -> None: ...

    def forward(self, x: torch.Tensor) -> None:
        """Norm x (rows, size) float32 in place."""

class LmHead:
    """The final norm and the output matrix."""

    def __init__(self, norm: torch.Tensor, matrix: Matrix, *, eps: float, logit_scale: float = 1.0, logit_cap: float = 0.0) -> None: ...

    def logits(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write the logits of x (N, C) float32 to out (N, V) float32."""

class Pages:
    """
    The K and V memory of one layer, (G, pages, 16 * head_dim) each, borrowed.

    `rotation` (D, D) float32, orthogonal, and `sketches` (G, pages, D + 16) bfloat16, zeros at first, are for searches.
    int8_keys and int8_values, shaped as the keys, and `scales` (G, pages, 2) float32 are for int8 copies.
    Queries attend to all with a logit for each of their heads, `attention_sink_logits` (H) float32, beside those of the
    keys, and with scores that `score_cap` bounds.
    """

    @overload
    def __init__(self, keys: torch.Tensor, values: torch.Tensor, head_dim: int, rotation: torch.Tensor | None = None, sketches: torch.Tensor | None = None, int8_keys: torch.Tensor | None = None, int8_values: torch.Tensor | None = None, scales: torch.Tensor | None = None, attention_sink_logits: torch.Tensor | None = None, score_cap: float = 0.0) -> None: ...

    @overload
    def __init__(self, codes: torch.Tensor, head_dim: int, *, is_bf16: bool, hadamard: bool, rotation: torch.Tensor | None = None, sketches: torch.Tensor | None = None, attention_sink_logits: torch.Tensor | None = None, score_cap: float = 0.0) -> None:
        """
        K and V as int8 with scales: `codes` (G, pages, 32 * head_dim + 64) int8. Queries and outputs are bfloat16 or
        float32. Where tokens are copied, (N, G, D + 2) int8, a scale of bfloat16 lies behind their codes.

        `hadamard`: heads are rotated so before they are rounded, queries too, and outputs are rotated back.
        """

    def rope_and_write(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, rotated: torch.Tensor, sink_positions: torch.Tensor | None = None, q_sinks: torch.Tensor | None = None, rotation: int = 0) -> None:
        """
        Rotate q (N, H * D) and k to `positions` (N) int64 of the tables (S, R * D / 2), of which rotation `rotation`
        counts, and write k and v (N, G * D) to `slots` (N) int64.

        Out: `rotated` (N, H, D), and q_sinks (N, H, D), rotated to sink_positions (N) int64.
        """

    def read(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy tokens of `slots` out to k and v (N, G, D)."""

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy tokens k and v (N, G, D) into `slots`; keys are rotated."""

    def attend(self, q: torch.Tensor, starts: Sequence[int], counts: Sequence[int], lists: torch.Tensor, out: torch.Tensor, mass: torch.Tensor | None = None, q_sinks: torch.Tensor | None = None, sinks: int = 0, window: int = 0, coarse: Sequence[int] = [], search: tuple[Sequence[int], Sequence[int], Sequence[int]] = ([], [], [])) -> None:
        """
        Attend with q (B, T, H, D) to the pages of `lists` (B, P) or (B, G, P) int32.

        Out: `out` (B, T, H, D) and `mass` (B, G, P) float32. Keys of row b below coarse[b], in whole blocks of 64, are
        read from int8 copies, of int8 by their upper nibbles. `search`: first, last and picks (B); of the pages
        [first[b], last[b]) of row b's list each KV head sees the picks[b] nearest to its queries.
        """

def topk(scores: torch.Tensor, start: int, stop: int, ids: torch.Tensor) -> None:
    """
    Write the columns of the highest of scores (G, N) in [start, stop) to `ids` (G, picks) int64, ascending; the lowest
    columns among equals.
    """

class OffloadError(Exception):
    pass

class Store:
    """
    The store of pages that memory has no room for: an open file, or memory (bytes) uint8.
    """

    @overload
    def __init__(self, file: int, direct: int, bytes: int) -> None:
        """
        A file of so many bytes. `direct`: the same file, opened for reads that bypass the page cache; or -1.
        """

    @overload
    def __init__(self, memory: torch.Tensor) -> None: ...

    def limit(self, bytes_per_second: float) -> None:
        """Slow reads down to this rate; 0 is no limit."""

    @property
    def bytes_read(self) -> int:
        """Bytes read from the store."""

class Offload:
    """
    KV memory of layers whose pages lie in a store or in frames of an arena (bytes) uint8.
    """

    def __init__(self, *, arena: torch.Tensor, is_bf16: bool, coded: bool, hadamard: bool, layers: int, heads: int, dim: int, pages: int, frames: int, buffers: int, buffer_frames: int, store: Store, attention_sink_logits: torch.Tensor | None = None, score_cap: float = 0.0) -> None:
        """attention_sink_logits (layers, H) float32 and score_cap: see Pages."""

    def layer(self, i: int) -> Pages:
        """The pages of a layer."""

    def prefer(self, layers: Sequence[bool]) -> None:
        """Keep the layers that are true in memory whole."""

    def reserve(self, pages: Sequence[int]) -> None:
        """Make room in the store for these pages."""

    def commit(self, layer: int, pages: Sequence[int]) -> None:
        """Write pages, which are full of committed tokens, to the store."""

    def forget(self, pages: Sequence[int]) -> None:
        """Drop these pages."""

    @property
    def page_counts(self) -> tuple[int, int, int]:
        """
        Pages of a KV head that were read ahead, read on demand, and kept in memory after being read ahead.
        """

class LayerwisePass:
    """
    A forward pass over some layers of an offloaded memory that goes layer by layer.

    It reads ahead from the start. lists: of each layer its lists, int32 (B, U) or (B, G, U), and its starts (B).
    """

    def __init__(self, *, memory: Offload, first_layer: int, lists: Sequence[tuple[torch.Tensor, Sequence[int]]], counts: Sequence[int], width: int, exact: bool, keep: int) -> None: ...

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, mass: torch.Tensor | None = None) -> None:
        """
        Attend in the next layer with q (B, T, H, D). Out: out (B, T, H, D), mass (B, G, U) float32.
        """

class Noise:
    """The noise of a batch's rows, keyed by their seeds and choices."""

    def __init__(self, seeds: Sequence[int], choices: Sequence[int]) -> None: ...

    def uniforms(self, draws: torch.Tensor, tier: int, used: numpy.typing.NDArray[numpy.int64], out: torch.Tensor) -> None:
        """
        Write the next uniforms of each row for a tier to out (B, n) float64, and add used (B) to its draws.

        draws (tiers, B) int64: the numbers drawn so far.
        """

class DraftArrays:
    """
    Tokens (B, K) int64, their probs (B, K, V) float64, the tiers that they come from (B, K), and how many each row has
    (B).

    In seeded verification probs have no entries.
    """

    def __init__(self, *, tokens: numpy.typing.NDArray[numpy.int64], probs: torch.Tensor, origins: numpy.typing.NDArray[numpy.int64], counts: numpy.typing.NDArray[numpy.int64]) -> None: ...

class Sampler:
    """The sampling parameters of a batch, whose rows are added one by one."""

    def __init__(self, vocabulary: int) -> None: ...

    def add(self, *, temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float, presence_penalty: float, frequency_penalty: float, logit_bias: Sequence[tuple[int, float]], prompt_length: int) -> None:
        """Add a row."""

    def verify_seeded(self, *, logits: torch.Tensor, ids: numpy.typing.NDArray[numpy.int64], lengths: numpy.typing.NDArray[numpy.int64], live: numpy.typing.NDArray[numpy.bool], draft: DraftArrays, out: DraftArrays, tier: int, noise: Noise | torch.Tensor) -> tuple[int, int, float] | None:
        """
        Verify a draft of K tokens by logits (B, K + 1, V) float32 or float64 and write the result to `out`.

        ids (B, S), lengths and live (B): the texts. noise: keys, or exponentials (B, K + 1, V) float64. Returns row,
        column and largest logit of a column without a distribution, or None.
        """

    def verify_by_rejection(self, *, logits: torch.Tensor, ids: numpy.typing.NDArray[numpy.int64], lengths: numpy.typing.NDArray[numpy.int64], live: numpy.typing.NDArray[numpy.bool], draft: DraftArrays, out: DraftArrays, tier: int, noise: torch.Tensor) -> tuple[int, int, float] | None:
        """
        Verify a draft by rejection sampling; as verify_seeded, with noise: uniforms (B, K + 1) float64.
        """

class View:
    """
    The keys that queries see in some consecutive layers.

    `lists` of pages int32 (B, P), (B, G, P) or (layers, B, G, P); the other fields as in `Pages.attend`.
    """

    def __init__(self, *, layers: int, lists: torch.Tensor, starts: Sequence[int], sinks: int = 0, window: int = 0, coarse: Sequence[int] = [], search: tuple[Sequence[int], Sequence[int], Sequence[int]] = ([], [], [])) -> None: ...

class Decoder:
    """
    A model. `rotations`: the number of each layer's in the tables of a pass.
    """

    def __init__(self, layers: Sequence[DecoderLayer], head: LmHead, embedding: Embedding, *, rotations: Sequence[int]) -> None: ...

    def forward(self, *, memory: Sequence[Pages], ids: torch.Tensor, positions: Sequence[int], counts: Sequence[int], cos: torch.Tensor, sin: torch.Tensor, views: Sequence[View], at: torch.Tensor | None, logits: torch.Tensor, queries: torch.Tensor | None = None, mass: torch.Tensor | None = None, first_layer: int = 0, last_layer: int = -1, x: torch.Tensor | None = None, exact: bool = False, keep: int = 0, state_layers: Sequence[int] = [], states: torch.Tensor | None = None) -> float:
        """
        Run a forward pass of ids (B, T) int64, counts[b] tokens of row b from positions[b] on, over the pages of each
        layer.

        Out: `logits` (B, J, V) float32 of columns `at` (B, J) int64, or of all; rotated `queries` (L, B, T, H, D);
        `mass` (L, B, G, P) float32. If only layers [first_layer, last_layer) are run, the residual stream stays in `x`
        (B, T, C) float32. For offloaded memory: keys before the starts are committed if `exact`, and the `keep` pages
        of most mass stay in memory. `states` (layers, B, T, C) float32 gets the residual stream behind so many layers
        as each of `state_layers` says.

        Returns how many experts the first tokens, at most 8, have chosen together in the mean of the layers that were
        finished.
        """

class DraftedTexts:
    """
    Texts ids (B, S), behind each live row of which K tokens are drawn one after another.

    The model has seen positions[b] tokens of row b; `view` is that of the first pass. noise: keys for seeded draws;
    else uniforms (K, B) float64, with which probs (K, B, V) float64 are written. Out: tokens (B, K), which are appended
    to ids, too.
    """

    def __init__(self, *, positions: Sequence[int], cos: torch.Tensor, sin: torch.Tensor, view: View, ids: numpy.typing.NDArray[numpy.int64], lengths: numpy.typing.NDArray[numpy.int64], live: numpy.typing.NDArray[numpy.bool], sampler: Sampler, noise: Noise | torch.Tensor, probs: torch.Tensor, tokens: numpy.typing.NDArray[numpy.int64]) -> None: ...

def fused_draft(*, decoder: Decoder, memory: Sequence[Pages], texts: DraftedTexts) -> tuple[int, float] | None:
    """
    Draw tokens of a model. Returns row and largest logit of a token without a distribution, or None.
    """

class FeatureDraft:
    """
    A draft that reads hidden states of a target, and its embedding; weights of one type. `tokens`: those that the
    head's rows propose.
    """

    def __init__(self, *, embedding: Embedding, fc: torch.Tensor, q_proj: torch.Tensor, k_proj: torch.Tensor, v_proj: torch.Tensor, o_proj: torch.Tensor, gate_proj: torch.Tensor, up_proj: torch.Tensor, down_proj: torch.Tensor, head: torch.Tensor, embedding_proj: torch.Tensor | None, embedding_norm: torch.Tensor, hidden_norm: torch.Tensor, post_norm: torch.Tensor, norm: torch.Tensor, fc_norm: torch.Tensor | None, tokens: Sequence[int], head_dim: int, eps: float, norm_output: bool, norm_before_residual: bool, bits: int = 0) -> None: ...

    @property
    def bytes(self) -> int:
        """Size of the packed weights."""

    def forward(self, *, entries: Pages, states: torch.Tensor, ids: torch.Tensor, positions: Sequence[int], counts: Sequence[int], cos: torch.Tensor, sin: torch.Tensor, view: View, at: torch.Tensor, logits: torch.Tensor) -> None:
        """
        Run a pass of ids (B, T) int64 over entries and states (slots, C).

        Out: `logits` (B, J, V) float32 of columns `at` (B, J) int64; a row's last output becomes the state of its slot.
        """

    def note(self, *, entries: Pages, states: torch.Tensor, ids: torch.Tensor, positions: numpy.typing.NDArray[numpy.int64], slots: numpy.typing.NDArray[numpy.int64], before: numpy.typing.NDArray[numpy.int64], columns: numpy.typing.NDArray[numpy.int64], passed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """
        Make states and entries of N tokens of a pass of the target, at `slots`, behind those at `before`.

        `passed` (S, B * T, C) float32 is what it gave, `columns` where in it each token stands.
        """

    def fused_draft(self, *, entries: Pages, states: torch.Tensor, texts: DraftedTexts) -> tuple[int, float] | None:
        """Draw tokens as `fused_draft` does."""

def read(words: torch.Tensor) -> int:
    """
    Read words (N) int64 at the bandwidth of memory. Returns their exclusive or.
    """

def compute(numbers: str, rounds: int) -> int:
    """
    Multiply and add numbers of a type, float32, bfloat16, int16 or int8, in registers, as products do. Returns the
    operations.
    """

# Generated from csrc/ by scripts/native_stub.py: do not edit.

"""
CPU kernels of triforce. A row's result depends on that row alone, bit for bit.
"""

from collections.abc import Sequence
from typing import Any, overload

import numpy
import numpy.typing

import triforce.model.weights


def levels() -> list[str]:
    """Instruction-set levels that this CPU can run, slowest first."""

def level() -> str:
    """Name of the instruction-set level in use."""

def use(level: str) -> None:
    """
    Use one level from now on; ValueError if it is unknown or this CPU cannot run it.
    """

def threads() -> int:
    """Number of threads of a kernel."""

def set_threads(count: int) -> None:
    """Set the number of threads; ValueError below 1."""

def usable_cpus() -> int:
    """
    Number of CPUs that this process may use: the CPUs of its affinity, or the quota of its control groups, if smaller.
    """

def cpu_quota(root: str = '') -> int | None:
    """
    CPU quota of this process's control groups, in CPUs, rounded up; None without a limit. root: folder of /proc and
    /sys.
    """

class Matrix:
    """
    Weights (outputs, inputs) of bfloat16, float32 or a GGUF type, packed for the kernels.

    bits: 8 or 4 rounds weights of more bits; 0 keeps them.
    """

    def __init__(self, weight: numpy.typing.NDArray[Any] | triforce.model.weights.QuantizedWeight, *, bits: int = 0) -> None: ...

    @property
    def bytes(self) -> int:
        """Size of the packed weights."""

    def linear(self, x: numpy.typing.NDArray[Any], y: numpy.typing.NDArray[Any], *, int8_inputs: bool = False) -> None:
        """
        Write y = x W^T to y (rows, outputs) float32. x (rows, inputs) is of the type of the weights; for weights of a
        GGUF type, of the type of their inputs. int8_inputs: whether inputs of weights with a scale for each group are
        rounded to int8, not to int16.
        """

    def rows(self, ids: numpy.typing.NDArray[Any], out: numpy.typing.NDArray[Any]) -> None:
        """
        Write rows `ids` (count) int64 of the weight to out (count, inputs) float32.
        """

class Embedding:
    """
    Embedding: rows of a table (V, C) in its file's type, borrowed, or of a packed matrix, times `scale`.
    """

    @overload
    def __init__(self, matrix: Matrix, scale: float = 1.0) -> None: ...

    @overload
    def __init__(self, table: numpy.typing.NDArray[Any] | triforce.model.weights.QuantizedWeight, scale: float = 1.0) -> None: ...

    def rows(self, ids: numpy.typing.NDArray[Any], out: numpy.typing.NDArray[Any]) -> None:
        """Write rows `ids` (count) int64 to out (count, C) float32."""

class ExpertChoices:
    """For each expert: its rows, and the weights of its outputs."""

    @property
    def touched(self) -> int:
        """Number of distinct experts that the first 8 rows go through."""

class Experts:
    """
    The experts of a layer, with all outputs of their matrices or with some.

    Experts beyond the router's outputs are shared: all rows go through them. The router's rule: see
    `model.config.Experts`.
    """

    def __init__(self, post_norm: numpy.typing.NDArray[Any] | None, *, router: numpy.typing.NDArray[Any], gate_projs: Sequence[object], up_projs: Sequence[object], down_projs: Sequence[object], router_bias: numpy.typing.NDArray[Any] | None = None, correction: numpy.typing.NDArray[Any] | None = None, gate_biases: Sequence[object] = [], up_biases: Sequence[object] = [], down_biases: Sequence[object] = [], eps: float, bits: int = 0, activation: str = 'silu', chosen: int, sigmoid: bool = False, renormalised: bool = False, scale: float = 1.0, groups: int = 1, chosen_groups: int = 1) -> None: ...

    @property
    def stride(self) -> int:
        """Outputs of a gate projection, rounded up to a multiple of 16."""

    def gate(self, x: numpy.typing.NDArray[Any], gated: numpy.typing.NDArray[Any], *, int8_inputs: bool = False) -> ExpertChoices:
        """
        Choose K experts for each row of x (N, hidden) float32, including shared experts. Write the first half of each
        expert's MLP to `gated` (N * K, stride), expert after expert.
        """

    def down(self, choices: ExpertChoices, gated: numpy.typing.NDArray[Any], sum: numpy.typing.NDArray[Any]) -> None:
        """
        Write the weighted sum of the chosen experts' outputs to `sum` (N, outputs) float32. `gated` (N * K, inputs
        rounded up to a multiple of 16): the first halves of the experts' MLPs; rows end in zeros.
        """

class QkvProjections:
    """
    The query, key and value projections of a layer, for some of its heads.
    """

    def __init__(self, input_norm: numpy.typing.NDArray[Any] | None, q_proj: numpy.typing.NDArray[Any] | triforce.model.weights.QuantizedWeight, k_proj: numpy.typing.NDArray[Any] | triforce.model.weights.QuantizedWeight, v_proj: numpy.typing.NDArray[Any] | triforce.model.weights.QuantizedWeight, q_bias: numpy.typing.NDArray[Any] | None, k_bias: numpy.typing.NDArray[Any] | None, v_bias: numpy.typing.NDArray[Any] | None, q_norm: numpy.typing.NDArray[Any] | None, k_norm: numpy.typing.NDArray[Any] | None, *, head_dim: int, eps: float, bits: int = 0, query_scale: float = 1.0) -> None: ...

    def qkv(self, x: numpy.typing.NDArray[Any], q: numpy.typing.NDArray[Any], k: numpy.typing.NDArray[Any], v: numpy.typing.NDArray[Any]) -> None:
        """
        Write q (N, H * D), k and v (N, G * D) of x (N, C), before rotation. All are float32.
        """

class DecoderLayer(QkvProjections):
    """A decoder layer without rotation and attention."""

    def __init__(self, input_norm: numpy.typing.NDArray[Any] | None, q_proj: numpy.typing.NDArray[Any] | triforce.model.weights.QuantizedWeight, k_proj: numpy.typing.NDArray[Any] | triforce.model.weights.QuantizedWeight, v_proj: numpy.typing.NDArray[Any] | triforce.model.weights.QuantizedWeight, o_proj: numpy.typing.NDArray[Any] | triforce.model.weights.QuantizedWeight, post_norm: numpy.typing.NDArray[Any] | None, gate_proj: numpy.typing.NDArray[Any] | triforce.model.weights.QuantizedWeight | None, up_proj: numpy.typing.NDArray[Any] | triforce.model.weights.QuantizedWeight | None, down_proj: numpy.typing.NDArray[Any] | triforce.model.weights.QuantizedWeight | None, q_bias: numpy.typing.NDArray[Any] | None, k_bias: numpy.typing.NDArray[Any] | None, v_bias: numpy.typing.NDArray[Any] | None, q_norm: numpy.typing.NDArray[Any] | None, k_norm: numpy.typing.NDArray[Any] | None, *, attn_out_norm: numpy.typing.NDArray[Any] | None = None, mlp_out_norm: numpy.typing.NDArray[Any] | None = None, o_bias: numpy.typing.NDArray[Any] | None = None, gate_bias: numpy.typing.NDArray[Any] | None = None, up_bias: numpy.typing.NDArray[Any] | None = None, down_bias: numpy.typing.NDArray[Any] | None = None, experts: Experts | None = None, head_dim: int, eps: float, bits: int = 0, query_scale: float = 1.0, residual_scale: float = 1.0, activation: str = 'silu') -> None: ...

    @property
    def bytes(self) -> int:
        """Size of the packed weights."""

    def finish(self, x: numpy.typing.NDArray[Any], attn_out: numpy.typing.NDArray[Any], *, int8_inputs: bool = False) -> int:
        """
        Add the output projection of attention, `attn_out` (N, H * D), and then the MLP to x (N, C) float32.

        Returns the number of distinct experts of the first 8 tokens; 0 without experts.
        """

class GatedMlp:
    """The first half of an MLP, with all of its outputs or with some."""

    def __init__(self, post_norm: numpy.typing.NDArray[Any] | None, gate_proj: numpy.typing.NDArray[Any] | triforce.model.weights.QuantizedWeight, up_proj: numpy.typing.NDArray[Any] | triforce.model.weights.QuantizedWeight, gate_bias: numpy.typing.NDArray[Any] | None = None, up_bias: numpy.typing.NDArray[Any] | None = None, *, eps: float, bits: int = 0, activation: str = 'silu') -> None: ...

    @property
    def stride(self) -> int:
        """Outputs, rounded up to a multiple of 16."""

    def forward(self, x: numpy.typing.NDArray[Any], gated: numpy.typing.NDArray[Any], *, int8_inputs: bool = False) -> None:
        """
        Norm x (rows, hidden) float32. Write the activation of its gate and up projection to `gated` (rows, stride).
        """

class Norm:
    """An RMSNorm of rows."""

    def __init__(self, weight: numpy.typing.NDArray[Any], *, eps: float) -> None: ...

    def forward(self, x: numpy.typing.NDArray[Any]) -> None:
        """Norm x (rows, size) float32 in place."""

class LmHead:
    """The final norm and the output matrix."""

    def __init__(self, norm: numpy.typing.NDArray[Any], matrix: Matrix, *, eps: float, logit_scale: float = 1.0, logit_cap: float = 0.0) -> None: ...

    def logits(self, x: numpy.typing.NDArray[Any], out: numpy.typing.NDArray[Any]) -> None:
        """Write the logits of x (N, C) float32 to out (N, V) float32."""

class Pages:
    """
    The K and V memory of one layer, (G, pages, 16 * head_dim) each, borrowed.

    For searches: `rotation` (D, D) float32, orthogonal, and `sketches` (G, pages, D + 16) bfloat16, zeros at first.
    For int8 copies: int8_keys and int8_values, shaped as the keys, and `scales` (G, pages, 2) float32.
    attention_sink_logits (H) float32: one logit per query head in the softmax's denominator. score_cap: cap of scores;
    0: no cap.
    """

    @overload
    def __init__(self, keys: numpy.typing.NDArray[Any], values: numpy.typing.NDArray[Any], head_dim: int, rotation: numpy.typing.NDArray[Any] | None = None, sketches: numpy.typing.NDArray[Any] | None = None, int8_keys: numpy.typing.NDArray[Any] | None = None, int8_values: numpy.typing.NDArray[Any] | None = None, scales: numpy.typing.NDArray[Any] | None = None, attention_sink_logits: numpy.typing.NDArray[Any] | None = None, score_cap: float = 0.0) -> None: ...

    @overload
    def __init__(self, codes: numpy.typing.NDArray[Any], head_dim: int, *, is_bf16: bool, hadamard: bool, rotation: numpy.typing.NDArray[Any] | None = None, sketches: numpy.typing.NDArray[Any] | None = None, attention_sink_logits: numpy.typing.NDArray[Any] | None = None, score_cap: float = 0.0) -> None:
        """
        K and V as int8 with scales: `codes` (G, pages, 32 * head_dim + 64) int8. Queries and outputs are bfloat16 or
        float32. Tokens are copied as (N, G, D + 2) int8: codes, then a scale of bfloat16.

        hadamard: heads are rotated by Hadamard matrices before rounding, and so are queries; outputs are rotated back.
        """

    def rope_and_write(self, q: numpy.typing.NDArray[Any], k: numpy.typing.NDArray[Any], v: numpy.typing.NDArray[Any], cos: numpy.typing.NDArray[Any], sin: numpy.typing.NDArray[Any], positions: numpy.typing.NDArray[Any], slots: numpy.typing.NDArray[Any], rotated: numpy.typing.NDArray[Any], sink_positions: numpy.typing.NDArray[Any] | None = None, q_sinks: numpy.typing.NDArray[Any] | None = None, rotation: int = 0) -> None:
        """
        Rotate q (N, H * D) and k (N, G * D) to `positions` (N) int64, and write k and v (N, G * D) to `slots` (N)
        int64.

        cos and sin (S, R * D / 2): tables of R rotations; rotation: index of the layer's rotation.
        Out: `rotated` (N, H, D): queries; q_sinks (N, H, D): queries rotated to sink_positions (N) int64.
        """

    def read(self, slots: numpy.typing.NDArray[Any], k: numpy.typing.NDArray[Any], v: numpy.typing.NDArray[Any]) -> None:
        """Copy tokens of `slots` out to k and v (N, G, D)."""

    def write(self, slots: numpy.typing.NDArray[Any], k: numpy.typing.NDArray[Any], v: numpy.typing.NDArray[Any]) -> None:
        """Copy tokens k and v (N, G, D) into `slots`; keys are rotated."""

    def attend(self, q: numpy.typing.NDArray[Any], starts: Sequence[int], counts: Sequence[int], lists: numpy.typing.NDArray[Any], out: numpy.typing.NDArray[Any], mass: numpy.typing.NDArray[Any] | None = None, q_sinks: numpy.typing.NDArray[Any] | None = None, sinks: int = 0, window: int = 0, coarse: Sequence[int] = [], search: tuple[Sequence[int], Sequence[int], Sequence[int]] = ([], [], [])) -> None:
        """
        Attend with q (B, T, H, D) to the pages of `lists` (B, P) or (B, G, P) int32.

        Out: `out` (B, T, H, D) and `mass` (B, G, P) float32. Keys of row b below coarse[b], in whole blocks of 64, are
        read from int8 copies, or by upper nibbles if KV is int8. search: first, last and picks (B). Of the pages
        [first[b], last[b]) of row b's list, each KV head sees the picks[b] pages nearest to its queries.
        """

def topk(scores: numpy.typing.NDArray[Any], start: int, stop: int, ids: numpy.typing.NDArray[Any]) -> None:
    """
    Write the columns in [start, stop) of the highest scores (G, N) to `ids` (G, picks) int64, ascending. Among equal
    scores the lowest columns win.
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
        A file of `bytes` bytes. `direct`: the same file, opened for reads that bypass the page cache; or -1.
        """

    @overload
    def __init__(self, memory: numpy.typing.NDArray[Any]) -> None: ...

    def limit(self, bytes_per_second: float) -> None:
        """Limit all reads together to this rate; 0: no limit."""

    @property
    def bytes_read(self) -> int:
        """Bytes read from the store."""

class Offload:
    """
    KV memory of layers whose pages lie in a store or in frames of an arena (bytes) uint8.
    """

    def __init__(self, *, arena: numpy.typing.NDArray[Any], is_bf16: bool, coded: bool, hadamard: bool, layers: int, heads: int, dim: int, pages: int, frames: int, buffers: int, buffer_frames: int, store: Store, attention_sink_logits: numpy.typing.NDArray[Any] | None = None, score_cap: float = 0.0) -> None:
        """attention_sink_logits (layers, H) float32 and score_cap: see Pages."""

    def layer(self, i: int) -> Pages:
        """The pages of a layer."""

    def prefer(self, layers: Sequence[bool]) -> None:
        """Set the layers that stay in memory whole, one bool for each layer."""

    def reserve(self, pages: Sequence[int]) -> None:
        """Make room in the store for these pages."""

    def commit(self, layer: int, pages: Sequence[int]) -> None:
        """Write pages, which are full of committed tokens, to the store."""

    def forget(self, pages: Sequence[int]) -> None:
        """Drop these pages."""

    @property
    def page_counts(self) -> tuple[int, int, int]:
        """
        Counts of pages of a KV head: read ahead, read on demand, and kept in memory after being read ahead.
        """

class LayerwisePass:
    """
    A forward pass over some layers of an offloaded memory that goes layer by layer. It reads ahead from the start.

    lists: page list of each layer, int32 (B, U) or (B, G, U), and its starts (B). exact: whether keys before the starts
    are committed. keep: pages of most attention mass that stay in memory, per row, layer and KV head.
    """

    def __init__(self, *, memory: Offload, first_layer: int, lists: Sequence[tuple[numpy.typing.NDArray[Any], Sequence[int]]], counts: Sequence[int], width: int, exact: bool, keep: int) -> None: ...

    def attend(self, layer: int, q: numpy.typing.NDArray[Any], out: numpy.typing.NDArray[Any], mass: numpy.typing.NDArray[Any] | None = None) -> None:
        """
        Attend in the next layer with q (B, T, H, D). Out: out (B, T, H, D), mass (B, G, U) float32.
        """

class Noise:
    """The noise of a batch's rows, keyed by their seeds and choices."""

    def __init__(self, seeds: Sequence[int], choices: Sequence[int]) -> None: ...

    def uniforms(self, draws: numpy.typing.NDArray[Any], tier: int, used: numpy.typing.NDArray[numpy.int64], out: numpy.typing.NDArray[Any]) -> None:
        """
        Write the next uniforms of each row for a tier to out (B, n) float64, and add used (B) to the row's draws.

        draws (tiers, B) int64: counts of the numbers drawn so far.
        """

class DraftArrays:
    """
    A draft: tokens (B, K) int64, their probs (B, K, V) float64, the tiers `origins` (B, K) that they come from, and the
    number of tokens of each row, `counts` (B).

    probs has no entries in seeded verification.
    """

    def __init__(self, *, tokens: numpy.typing.NDArray[numpy.int64], probs: numpy.typing.NDArray[Any], origins: numpy.typing.NDArray[numpy.int64], counts: numpy.typing.NDArray[numpy.int64]) -> None: ...

class Sampler:
    """The sampling parameters of a batch, whose rows are added one by one."""

    def __init__(self, vocabulary: int) -> None: ...

    def add(self, *, temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float, presence_penalty: float, frequency_penalty: float, logit_bias: Sequence[tuple[int, float]], prompt_length: int) -> None:
        """Add a row."""

    def verify_seeded(self, *, logits: numpy.typing.NDArray[Any], ids: numpy.typing.NDArray[numpy.int64], lengths: numpy.typing.NDArray[numpy.int64], live: numpy.typing.NDArray[numpy.bool], draft: DraftArrays, out: DraftArrays, tier: int, noise: Noise | numpy.typing.NDArray[Any]) -> tuple[int, int, float] | None:
        """
        Verify a draft of K tokens by logits (B, K + 1, V) float32 or float64 and write the result to `out`.

        ids (B, S), lengths and live (B): the texts. noise: keys, or exponentials (B, K + 1, V) float64. Returns row,
        column and largest logit of a column without a distribution, or None.
        """

    def verify_by_rejection(self, *, logits: numpy.typing.NDArray[Any], ids: numpy.typing.NDArray[numpy.int64], lengths: numpy.typing.NDArray[numpy.int64], live: numpy.typing.NDArray[numpy.bool], draft: DraftArrays, out: DraftArrays, tier: int, noise: numpy.typing.NDArray[Any]) -> tuple[int, int, float] | None:
        """
        Verify a draft by rejection sampling. noise: uniforms (B, K + 1) float64; other arguments as in `verify_seeded`.
        """

    def verify_by_block(self, *, logits: numpy.typing.NDArray[Any], ids: numpy.typing.NDArray[numpy.int64], lengths: numpy.typing.NDArray[numpy.int64], live: numpy.typing.NDArray[numpy.bool], draft: DraftArrays, out: DraftArrays, tier: int, noise: numpy.typing.NDArray[Any]) -> tuple[int, int, float] | None:
        """
        Verify a draft by rejection of blocks; arguments as in `verify_by_rejection`.
        """

class View:
    """
    The keys that queries see in some consecutive layers.

    lists: page numbers, int32 (B, P), (B, G, P) or (layers, B, G, P). Other arguments as in `Pages.attend`.
    """

    def __init__(self, *, layers: int, lists: numpy.typing.NDArray[Any], starts: Sequence[int], sinks: int = 0, window: int = 0, coarse: Sequence[int] = [], search: tuple[Sequence[int], Sequence[int], Sequence[int]] = ([], [], [])) -> None: ...

class Decoder:
    """
    A decoder. rotations: index of each layer's rotation in the tables of a pass. int8_inputs: whether the inputs of o,
    gate and up projections are rounded to int8, see `Matrix.linear`.
    """

    def __init__(self, layers: Sequence[DecoderLayer], head: LmHead, embedding: Embedding, *, rotations: Sequence[int], int8_inputs: bool = False) -> None: ...

    def forward(self, *, memory: Sequence[Pages], ids: numpy.typing.NDArray[Any], positions: Sequence[int], counts: Sequence[int], cos: numpy.typing.NDArray[Any], sin: numpy.typing.NDArray[Any], views: Sequence[View], at: numpy.typing.NDArray[Any] | None, logits: numpy.typing.NDArray[Any], queries: numpy.typing.NDArray[Any] | None = None, mass: numpy.typing.NDArray[Any] | None = None, first_layer: int = 0, last_layer: int = -1, x: numpy.typing.NDArray[Any] | None = None, exact: bool = False, keep: int = 0, state_layers: Sequence[int] = [], states: numpy.typing.NDArray[Any] | None = None) -> float:
        """
        Run a forward pass of ids (B, T) int64, counts[b] tokens of row b from positions[b] on, over the pages of each
        layer.

        Out: `logits` (B, J, V) float32 of columns `at` (B, J) int64, or of all; rotated `queries` (L, B, T, H, D);
        `mass` (L, B, G, P) float32. If only layers [first_layer, last_layer) are run, the residual stream stays in `x`
        (B, T, C) float32. `states` (layers, B, T, C) float32 gets the residual stream after the number of layers in
        each entry of `state_layers`.

        With offloaded memory, `exact` says whether keys before the starts are committed. `keep` is the number of pages
        of most attention mass that stay in memory, per row, layer and KV head.

        Returns the number of distinct experts of the first 8 tokens, a mean over the finished layers with experts.
        """

class DraftedTexts:
    """
    Texts, ids (B, S). K tokens are drawn after each live row.

    The model has seen positions[b] tokens of row b. view: the view of the first pass. noise: keys for seeded draws;
    else uniforms (K, B) float64, with which probs (K, B, V) float64 are written. Out: tokens (B, K), which are also
    appended to ids.
    """

    def __init__(self, *, positions: Sequence[int], cos: numpy.typing.NDArray[Any], sin: numpy.typing.NDArray[Any], view: View, ids: numpy.typing.NDArray[numpy.int64], lengths: numpy.typing.NDArray[numpy.int64], live: numpy.typing.NDArray[numpy.bool], sampler: Sampler, noise: Noise | numpy.typing.NDArray[Any], probs: numpy.typing.NDArray[Any], tokens: numpy.typing.NDArray[numpy.int64]) -> None: ...

def fused_draft(*, decoder: Decoder, memory: Sequence[Pages], texts: DraftedTexts) -> tuple[int, float] | None:
    """
    Draft tokens by a decoder. Returns row and largest logit of a token without a distribution, or None.
    """

class EagleHead:
    """
    An EAGLE head: a draft of one layer that reads hidden states of a target, and the target's embedding. All weights
    are of one type. tokens: token ids of the rows of `head`.
    """

    def __init__(self, *, embedding: Embedding, fc: numpy.typing.NDArray[Any], q_proj: numpy.typing.NDArray[Any], k_proj: numpy.typing.NDArray[Any], v_proj: numpy.typing.NDArray[Any], o_proj: numpy.typing.NDArray[Any], gate_proj: numpy.typing.NDArray[Any], up_proj: numpy.typing.NDArray[Any], down_proj: numpy.typing.NDArray[Any], head: numpy.typing.NDArray[Any], embedding_proj: numpy.typing.NDArray[Any] | None, embedding_norm: numpy.typing.NDArray[Any], hidden_norm: numpy.typing.NDArray[Any], post_norm: numpy.typing.NDArray[Any], norm: numpy.typing.NDArray[Any], fc_norm: numpy.typing.NDArray[Any] | None, tokens: Sequence[int], head_dim: int, eps: float, norm_output: bool, norm_before_residual: bool, bits: int = 0) -> None: ...

    @property
    def bytes(self) -> int:
        """Size of the packed weights."""

    def forward(self, *, entries: Pages, states: numpy.typing.NDArray[Any], ids: numpy.typing.NDArray[Any], positions: Sequence[int], counts: Sequence[int], cos: numpy.typing.NDArray[Any], sin: numpy.typing.NDArray[Any], view: View, at: numpy.typing.NDArray[Any], logits: numpy.typing.NDArray[Any]) -> None:
        """
        Run a pass of ids (B, T) int64 over entries and states (slots, C).

        Out: `logits` (B, J, V) float32 of columns `at` (B, J) int64. The output of a row's last token becomes the state
        of its slot.
        """

    def note(self, *, entries: Pages, states: numpy.typing.NDArray[Any], ids: numpy.typing.NDArray[Any], positions: numpy.typing.NDArray[numpy.int64], slots: numpy.typing.NDArray[numpy.int64], before: numpy.typing.NDArray[numpy.int64], columns: numpy.typing.NDArray[numpy.int64], passed: numpy.typing.NDArray[Any], cos: numpy.typing.NDArray[Any], sin: numpy.typing.NDArray[Any]) -> None:
        """
        Store states and entries of N tokens of a target pass at `slots`. before: the slots of the tokens before them.

        passed (S, B * T, C) float32: the residual stream of the pass after each of S layers. columns: index of each
        token in B * T.
        """

    def fused_draft(self, *, entries: Pages, states: numpy.typing.NDArray[Any], texts: DraftedTexts) -> tuple[int, float] | None:
        """Draft tokens, as the function `fused_draft` does."""

def read(words: numpy.typing.NDArray[Any]) -> int:
    """
    Read words (N) int64 at the bandwidth of memory. Returns their exclusive or.
    """

def bit_sum(bytes: numpy.typing.NDArray[Any], size: int) -> int:
    """
    Return the sum of bytes (N) uint8: of these numbers, or of the signed integers of `size` bytes, 2 or 4.
    """

def compute(numbers: str, rounds: int) -> int:
    """
    Multiply and add numbers of a type (float32, bfloat16, int16 or int8) in registers, as products do. Returns the
    number of operations.
    """

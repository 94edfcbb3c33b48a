"""A decoder's weights, packed for the native kernels; on demand rounded to 8 or 4 bits. The residual stream is float32.

A pass over native KV memory is one native call; a pass over other memory goes layer by layer.

Shape suffixes as in kernel_api.py; Q = H * D, I MLP size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import TypeVar

import numpy as np

from triforce.arrays import HOST_TYPES, Array, DType, dtype_name, float32, rounded
from triforce.backends.cpu import _native
from triforce.backends.cpu.kv import NO_SEARCH, NativeKV, rotations
from triforce.backends.kernel_api import PAGE, ForwardBatch, ForwardOutput, KVBackend, ModelBackend, PageTable
from triforce.backends.layerwise import forward_layerwise
from triforce.distributed.group import TPGroup, span
from triforce.errors import CacheError, ModelError
from triforce.model.config import ModelConfig
from triforce.model.weights import Layer, Matrix, QuantizedWeight, Weights
from triforce.ragged import Bools, Ints
from triforce.sampling.logits import non_finite_logits

L = TypeVar("L")
ROWS = 4096
"""Rows of an embedding that are packed at once."""
Draws = tuple[_native.Sampler, "_native.Noise | Array", Array]


class NativeEmbedding:
    """Embedding of all tokens, or of one rank's tokens.

    The table is a tensor, a quantized weight in its file, or a packed matrix.
    """

    def __init__(self, config: ModelConfig, table_VC: Matrix | _native.Matrix, dtype: DType) -> None:
        """Raises ModelError."""
        self.config = config
        if isinstance(table_VC, QuantizedWeight):
            require_finite(table_VC)
        scale = float(float32(rounded(np.array([config.architecture.embedding_scale], np.float32), dtype))[0])
        self.embedding = _native.Embedding(table_VC, scale)

    def embed(self, ids_N: Ints) -> Array:
        x_NC = np.empty((len(ids_N), self.config.hidden_size), np.float32)
        self.embedding.rows(np.ascontiguousarray(ids_N), x_NC)
        return x_NC


class EmbeddingAndHead(NativeEmbedding):
    """Embedding and head of all tokens, or of one rank's tokens; a tied head and its embedding are one matrix."""

    width_independent = True

    def __init__(self, config: ModelConfig, weights: Weights, bits: int) -> None:
        """Raises ModelError."""
        with packing("the head", weights.head_VC):
            self._matrix = _native.Matrix(weights.head_VC, bits=bits)
        tied = weights.head_VC is weights.embedding_VC
        super().__init__(config, self._matrix if tied else weights.embedding_VC, dtype_name(weights.head_VC))
        architecture = config.architecture
        self._head = _native.LmHead(
            weights.norm_C, self._matrix, eps=config.norm_eps, logit_scale=architecture.logit_scale,
            logit_cap=architecture.logit_cap,
        )  # fmt: skip
        self._tokens = len(weights.head_VC)

    def head_rows(self, ids_N: Ints) -> Array:
        """Return the head's rows of tokens `ids_N`, unpacked: float32 (N, C)."""
        rows_NC = np.empty((len(ids_N), self.config.hidden_size), np.float32)
        self._matrix.rows(np.ascontiguousarray(ids_N), rows_NC)
        return rows_NC

    def head(self, x_NC: Array) -> Array:
        logits_NV = np.empty((len(x_NC), self._tokens), np.float32)
        self._head.logits(x_NC, logits_NV)
        return logits_NV


@contextmanager
def packing(part: str, *weights: Matrix | None) -> Iterator[None]:
    """Release the file pages of `weights`, which are packed in this context. Raises ModelError if one is damaged."""
    try:
        yield
    except ValueError as error:
        raise ModelError(f"{part}: {error}; the file is damaged: download it again") from error
    for weight in weights:
        if isinstance(weight, QuantizedWeight):
            weight.release()


def require_finite(embedding_VC: QuantizedWeight) -> None:
    """Check the scales of an embedding that stays in its file: pack `ROWS` rows at a time. Raises ModelError."""
    with packing("the embedding", embedding_VC):
        for start_row in range(0, len(embedding_VC), ROWS):
            _native.Matrix(embedding_VC.part(slice(start_row, start_row + ROWS)))


def packed(make: Callable[[ModelConfig, Layer, int], L], config: ModelConfig, weights: Weights, bits: int) -> list[L]:
    """Pack each layer. Raises ModelError."""
    blocks = []
    for i, layer in enumerate(weights.layers):
        with packing(f"layer {i}", *layer.weights()):
            blocks.append(make(config, layer, bits))
    return blocks


def native_view(kv: NativeKV, layers: int, page_table: PageTable) -> _native.View:
    """Return the native view of `layers` consecutive layers with one page table."""
    return _native.View(
        layers=layers, lists=page_table.units, starts=page_table.starts, sinks=page_table.sinks,
        window=page_table.window, coarse=page_table.low_precision_ends if kv.int8 else [],
        search=page_table.search if page_table.search and kv.searches else NO_SEARCH,
    )  # fmt: skip


class NativeModel(EmbeddingAndHead):
    def __init__(self, config: ModelConfig, weights: Weights, bits: int = 0) -> None:
        super().__init__(config, weights, bits)
        self.reads_groups = bits == 4 or weights.has_groups
        """Whether products round their inputs by groups, to int16 or to int8."""
        self.blocks = packed(NativeLayer, config, weights, bits)
        self.decoder = self._decoder()

    def _decoder(self) -> _native.Decoder:
        return _native.Decoder(
            [block.native for block in self.blocks], self._head, self.embedding, rotations=self.config.rotations,
            int8_inputs=self.config.int8_inputs,
        )  # fmt: skip

    def with_int8_inputs(self) -> NativeModel:
        """Return this model with `ModelConfig.int8_inputs`; both share their weights."""
        twin = copy(self)
        twin.config = replace(self.config, int8_inputs=True)
        twin.blocks = [copy(block) for block in self.blocks]
        for block in twin.blocks:
            block.config = twin.config
        twin.decoder = twin._decoder()
        return twin

    def forward(self, ids_BT: Ints, kv: KVBackend, batch: ForwardBatch, at_BJ: Ints | None) -> ForwardOutput:
        if not isinstance(kv, NativeKV):
            return forward_layerwise(self, ids_BT, kv, batch, at_BJ)
        try:
            return self._forward(ids_BT, kv, batch, at_BJ)
        except _native.OffloadError as error:
            raise CacheError(str(error)) from error

    def _forward(self, ids_BT: Ints, kv: NativeKV, batch: ForwardBatch, at_BJ: Ints | None) -> ForwardOutput:
        B, T = ids_BT.shape
        config = self.config
        logits_BJV = np.empty((B, T if at_BJ is None else at_BJ.shape[1], config.vocab_size), np.float32)
        queries_LBTHD = mass_LBGU = states_SBTC = None
        if batch.observe:
            queries_shape = config.layers, B, T, config.heads, config.head_dim
            queries_LBTHD = np.empty(queries_shape, HOST_TYPES[kv.dtype])
        if batch.return_mass:
            units = batch.views[0][1].units.shape[-1]
            mass_LBGU = np.empty((config.layers, B, config.kv_heads, units), np.float32)
        if batch.state_layers:
            states_SBTC = np.empty((len(batch.state_layers), B, T, config.hidden_size), np.float32)
        rope = config.rope
        cos, sin = rope.tables_SF if max(batch.positions) + T <= rope.covered else rotations(rope, batch, T)
        mean_distinct_experts = self.decoder.forward(
            memory=kv.native_pages, ids=np.ascontiguousarray(ids_BT), positions=batch.positions,
            counts=batch.views[0][1].counts, cos=cos, sin=sin, views=[native_view(kv, *view) for view in batch.views],
            at=at_BJ, logits=logits_BJV, queries=queries_LBTHD, mass=mass_LBGU, exact=batch.past_committed,
            keep=batch.retained_pages, state_layers=batch.state_layers, states=states_SBTC,
        )  # fmt: skip
        return ForwardOutput(logits_BJV, queries_LBTHD, mass_LBGU, states_SBTC, mean_distinct_experts)

    def fused_draft(
        self, kv: NativeKV, batch: ForwardBatch, texts: tuple[Ints, Ints, Bools], draws: Draws, tokens_BK: Ints
    ) -> Array:
        """Draft K tokens after each text in one call, the same tokens as K passes and draws.

        batch: the first pass; the others follow from it. texts: ids (B, S) with room for the tokens, which are written
        there too, lengths, and a mask of live rows. draws: sampler, noise, and room for probabilities, as in
        `_native.fused_draft`. Returns the probabilities (B, K, V). Raises ModelError where logits are not finite.
        """
        (view,) = batch.views
        sampler, noise, probs = draws
        ids_BS, lengths_B, live_B = texts
        longest = int((lengths_B - np.array(batch.positions)).max()) + tokens_BK.shape[1]
        cos, sin = rotations(self.config.rope, batch, longest)
        drafted = _native.DraftedTexts(
            positions=batch.positions, cos=cos, sin=sin, view=native_view(kv, *view), ids=ids_BS, lengths=lengths_B,
            live=live_B, sampler=sampler, noise=noise, probs=probs, tokens=tokens_BK,
        )  # fmt: skip
        invalid = _native.fused_draft(decoder=self.decoder, memory=kv.native_pages, texts=drafted)
        if invalid:
            raise non_finite_logits(invalid[0], 0, invalid[1])
        return probs.swapaxes(0, 1)


class NativeLayer:
    def __init__(self, config: ModelConfig, layer: Layer, bits: int) -> None:
        self.config = config
        self.dtype = dtype_name(layer.o_proj_CQ)
        architecture = config.architecture
        self.native = _native.DecoderLayer(
            layer.input_norm_C, layer.q_proj_QC, layer.k_proj_PC, layer.v_proj_PC, layer.o_proj_CQ, layer.post_norm_C,
            layer.gate_proj_IC, layer.up_proj_IC, layer.down_proj_CI, layer.q_bias_Q, layer.k_bias_P, layer.v_bias_P,
            layer.q_norm_D, layer.k_norm_D, attn_out_norm=layer.attn_out_norm_C, mlp_out_norm=layer.mlp_out_norm_C,
            head_dim=config.head_dim, eps=config.norm_eps, bits=bits, query_scale=architecture.query_scale,
            residual_scale=architecture.residual_scale, activation=architecture.activation,
            o_bias=layer.o_bias_C, gate_bias=layer.gate_bias_I, up_bias=layer.up_bias_I, down_bias=layer.down_bias_C,
            experts=experts(config, layer, bits) if layer.experts else None,
        )  # fmt: skip

    def qkv(self, x_NC: Array) -> tuple[Array, ...]:
        return project(self.native, self.config, x_NC)

    def finish(self, x_NC: Array, attn_out_NQ: Array) -> int:
        return self.native.finish(x_NC, rounded(attn_out_NQ, self.dtype), int8_inputs=self.config.int8_inputs)


def project(
    native: _native.DecoderLayer | _native.QkvProjections, config: ModelConfig, x_NC: Array
) -> tuple[Array, ...]:
    """Return queries (N, H, D), keys and values (N, G, D)."""
    N = len(x_NC)
    H = config.heads
    G = config.kv_heads
    D = config.head_dim
    q_NHD = np.empty((N, H, D), np.float32)
    k_NGD = np.empty((N, G, D), np.float32)
    v_NGD = np.empty((N, G, D), np.float32)
    native.qkv(x_NC, q_NHD.reshape(N, -1), k_NGD.reshape(N, -1), v_NGD.reshape(N, -1))
    return q_NHD, k_NGD, v_NGD


def experts(config: ModelConfig, layer: Layer, bits: int) -> _native.Experts:
    """Return the packed experts of a layer with experts."""
    routing = config.architecture.experts
    assert routing is not None and layer.router_EC is not None
    projections = {
        f"{part}_projs": [getattr(expert, f"{part}_proj_{shape}") for expert in layer.experts]
        for part, shape in (("gate", "IC"), ("up", "IC"), ("down", "CI"))
    }
    biases = {
        f"{part}_biases": [getattr(expert, f"{part}_bias_{shape}") for expert in layer.experts]
        for part, shape in (("gate", "I"), ("up", "I"), ("down", "C"))
        if routing.biases
    }
    return _native.Experts(
        layer.post_norm_C, router=layer.router_EC, router_bias=layer.router_bias_E,
        correction=layer.router_correction_E, **projections, **biases, eps=config.norm_eps, bits=bits,
        activation=config.architecture.activation, chosen=routing.chosen, sigmoid=routing.function == "sigmoid",
        renormalised=routing.renormalised, scale=routing.scale, groups=routing.groups,
        chosen_groups=routing.chosen_groups,
    )  # fmt: skip


class NativeModelShard(EmbeddingAndHead):
    """Native weights of one rank. `config` has this rank's heads."""

    def __init__(self, config: ModelConfig, weights: Weights, bits: int = 0) -> None:
        super().__init__(config, weights, bits)
        self.blocks = packed(NativeLayerShard, config, weights, bits)


class NativeLayerShard:
    def __init__(self, config: ModelConfig, layer: Layer, bits: int) -> None:
        self.config = config
        architecture = config.architecture
        eps = config.norm_eps
        q_norm, k_norm = (None, None) if architecture.qk_norm == "row" else (layer.q_norm_D, layer.k_norm_D)
        self._query_scale = architecture.query_scale if architecture.qk_norm == "row" else 1.0
        """Factor of the queries, applied after a norm over all heads; 1 where the projections apply the factor."""
        self._projections = _native.QkvProjections(
            layer.input_norm_C, layer.q_proj_QC, layer.k_proj_PC, layer.v_proj_PC, layer.q_bias_Q, layer.k_bias_P,
            layer.v_bias_P, q_norm, k_norm, head_dim=config.head_dim, eps=eps, bits=bits,
            query_scale=architecture.query_scale / self._query_scale,
        )  # fmt: skip
        norm_weights = layer.q_norm_D, layer.k_norm_D, layer.attn_out_norm_C, layer.mlp_out_norm_C
        self._q_norm, self._k_norm, self._attn_out_norm, self._mlp_out_norm = (
            None if norm_weight is None else _native.Norm(norm_weight, eps=eps) for norm_weight in norm_weights
        )
        self._out = Product(layer.o_proj_CQ, layer.o_bias_C, bits, config.int8_inputs)
        self._mlp = ExpertsShard(config, layer, bits) if layer.experts else MlpShard(config, layer, bits)

    def qkv(self, x_NC: Array, ranks: TPGroup) -> tuple[Array, ...]:
        q_NHD, k_NGD, v_NGD = project(self._projections, self.config, x_NC)
        if self._q_norm and self._k_norm and self.config.architecture.qk_norm == "row":
            q_NHD = _norm_over_heads(q_NHD, self._q_norm, ranks)
            k_NGD = _norm_over_heads(k_NGD, self._k_norm, ranks)
        q_NHD *= np.float32(self._query_scale)
        return q_NHD, k_NGD, v_NGD

    def finish(self, x_NC: Array, attn_out_NQ: Array, ranks: TPGroup) -> int:
        self._add(x_NC, self._out(ranks.inputs(attn_out_NQ, self._out.inputs)), self._attn_out_norm, ranks)
        part_NC, distinct_experts = self._mlp(x_NC, ranks)
        self._add(x_NC, part_NC, self._mlp_out_norm, ranks)
        return distinct_experts

    def _add(self, x_NC: Array, part_NC: Array, norm: _native.Norm | None, ranks: TPGroup) -> None:
        """Add the outputs of all ranks to the residual stream, after their norm if there is one."""
        part_NC = ranks.outputs(part_NC, x_NC.shape[1])
        if norm:
            norm.forward(part_NC)
        x_NC += part_NC * np.float32(self.config.architecture.residual_scale)


class Product:
    """Product with one rank's part of a matrix: some outputs, with their biases, from all inputs or some."""

    def __init__(self, weight: Matrix, bias: Array | None, bits: int, int8_inputs: bool = False) -> None:
        self._outputs: int = weight.shape[0]
        self.inputs: int = weight.shape[1]
        self._dtype = dtype_name(weight)
        self._native = _native.Matrix(weight, bits=bits)
        self._int8_inputs = int8_inputs
        self._bias = None if bias is None else float32(bias)

    def __call__(self, x: Array) -> Array:
        y = np.empty((len(x), self._outputs), np.float32)
        self._native.linear(np.ascontiguousarray(rounded(x, self._dtype)), y, int8_inputs=self._int8_inputs)
        return y if self._bias is None else y + self._bias


class MlpShard:
    def __init__(self, config: ModelConfig, layer: Layer, bits: int) -> None:
        gate_IC = layer.gate_proj_IC
        up_IC = layer.up_proj_IC
        down_CI = layer.down_proj_CI
        assert gate_IC is not None and up_IC is not None and down_CI is not None
        self._gate = _native.GatedMlp(
            layer.post_norm_C, gate_IC, up_IC, layer.gate_bias_I, layer.up_bias_I, eps=config.norm_eps, bits=bits,
            activation=config.architecture.activation,
        )  # fmt: skip
        self._int8_inputs = config.int8_inputs
        self._gated = len(gate_IC)
        self._dtype = dtype_name(gate_IC)
        self._down = Product(down_CI, layer.down_bias_C, bits)

    def __call__(self, x_NC: Array, ranks: TPGroup) -> tuple[Array, int]:
        """Return this rank's outputs (N, some of C), and 0: no experts are read."""
        gated_NI = np.empty((len(x_NC), self._gate.stride), HOST_TYPES[self._dtype])
        self._gate.forward(x_NC, gated_NI, int8_inputs=self._int8_inputs)
        return self._down(ranks.inputs(gated_NI[:, : self._gated], self._down.inputs)), 0


class ExpertsShard:
    def __init__(self, config: ModelConfig, layer: Layer, bits: int) -> None:
        routing = config.architecture.experts
        first_expert = layer.experts[0]
        assert routing is not None
        self._native = experts(config, layer, bits)
        self._int8_inputs = config.int8_inputs
        self._per_row = routing.active
        self._gated = len(first_expert.gate_proj_IC)
        self._dtype = dtype_name(first_expert.gate_proj_IC)
        self._outputs: int = first_expert.down_proj_CI.shape[0]
        self._inputs: int = first_expert.down_proj_CI.shape[1]

    def __call__(self, x_NC: Array, ranks: TPGroup) -> tuple[Array, int]:
        """Return this rank's outputs (N, some of C), and the number of distinct experts that the first tokens read.

        Ranks exchange once for all experts.
        """
        gated_MI = np.empty((len(x_NC) * self._per_row, self._native.stride), HOST_TYPES[self._dtype])
        choices = self._native.gate(x_NC, gated_MI, int8_inputs=self._int8_inputs)
        read_MI = ranks.inputs(gated_MI[:, : self._gated], self._inputs)
        sum_NC = np.empty((len(x_NC), self._outputs), np.float32)
        self._native.down(choices, np.pad(read_MI, ((0, 0), (0, -self._inputs % 16))), sum_NC)
        return sum_NC, choices.touched


def _norm_over_heads(x_NHD: Array, norm: _native.Norm, ranks: TPGroup) -> Array:
    """Apply a norm over all ranks' heads of a row; return this rank's heads (N, H, D)."""
    rank_NQ = x_NHD.reshape(len(x_NHD), -1)
    all_NQ = ranks.gather(rank_NQ, rank_NQ.shape[1] * ranks.count)
    norm.forward(all_NQ)
    return np.ascontiguousarray(all_NQ[:, span(all_NQ.shape[1], ranks)]).reshape(x_NHD.shape)


PART_OPERATIONS = 6e10
"""Approximate operations of a call that runs a part of a prompt's pass: well under a second on two cores."""

NO_COLUMNS_10: Ints = np.empty((1, 0), np.int64)
"""Columns of a pass of one row that scores none."""

LEAST_TOKENS = 128
"""Least tokens of a call of `parts`. With fewer tokens, reading the weights again takes more time than is saved."""


def steps(
    model: ModelBackend, kv: KVBackend, ids_1T: Ints, batch: ForwardBatch
) -> Generator[int, None, ForwardOutput] | None:
    """Return the parts of a pass over many unscored tokens of one row; None for a model of other kernels.

    With offloaded KV the whole pass is one part, because a native call reads KV ahead for its own layers only.
    """
    if not isinstance(model, NativeModel):
        return None
    return parts(model, kv, ids_1T, batch) if type(kv) is NativeKV else _one_part(model, kv, ids_1T, batch)


def _one_part(
    model: NativeModel, kv: KVBackend, ids_1T: Ints, batch: ForwardBatch
) -> Generator[int, None, ForwardOutput]:
    yield from ()
    return model.forward(ids_1T, kv, batch, NO_COLUMNS_10)


def parts(model: NativeModel, kv: NativeKV, ids_1T: Ints, batch: ForwardBatch) -> Generator[int, None, ForwardOutput]:
    """Run a pass over many unscored tokens of one row in calls of about `PART_OPERATIONS` operations at most.

    A call takes all tokens through several layers, or some tokens through one layer. Each token has the bits of a pass
    in one call. Yields the progress after each call, as `Decoder.read` does.
    """
    _, T = ids_1T.shape
    config = model.config
    x_1TC = np.empty((1, T, config.hidden_size), np.float32)
    states_S1TC = None
    if batch.state_layers:
        states_S1TC = np.empty((len(batch.state_layers), 1, T, config.hidden_size), np.float32)
    experts_and_layers = list[tuple[float, int]]()
    layers, tokens = part_of_pass(config, batch.positions[0], T)
    for layer in range(0, config.layers, layers):
        stop = min(layer + layers, config.layers)
        for first_token in range(0, T, tokens):
            part = slice(first_token, min(first_token + tokens, T))
            distinct_experts = _forward_part(model, kv, ids_1T, batch, (layer, stop), part, x_1TC, states_S1TC)
            experts_and_layers += [(distinct_experts, stop - layer)] * (distinct_experts > 0 and first_token == 0)
            yield (layer * T + part.stop * (stop - layer)) // config.layers
    layer_count = sum(count for _, count in experts_and_layers)
    mean = sum(distinct_experts * count for distinct_experts, count in experts_and_layers) / max(1, layer_count)
    return ForwardOutput(np.empty((1, 0, config.vocab_size), np.float32), None, None, states_S1TC, mean)


def _forward_part(
    model: NativeModel,
    kv: NativeKV,
    ids_1T: Ints,
    batch: ForwardBatch,
    layers: tuple[int, int],
    part: slice,
    x_1TC: Array,
    states_S1TC: Array | None,
) -> float:
    """Take tokens `part` of a row through `layers`, (first, end), in place.

    If `batch.state_layers` names some of these layers, the residual stream after them goes to `states_S1TC`. Returns
    `ForwardOutput.mean_distinct_experts` of these layers.
    """
    first_token = part.start
    width = part.stop - part.start
    part_batch = replace(batch, positions=[batch.positions[0] + first_token])
    views = [(count, replace(table, starts=[table.starts[0] + first_token])) for count, table in batch.views]
    state_indices = [i for i, depth in enumerate(batch.state_layers) if layers[0] < depth <= layers[1]]
    states_shape = len(state_indices), 1, width, model.config.hidden_size
    states_K1TC = np.empty(states_shape, np.float32) if state_indices else None
    cos, sin = rotations(model.config.rope, part_batch, width)
    mean_distinct_experts = model.decoder.forward(
        memory=kv.native_pages, ids=np.ascontiguousarray(ids_1T[:, part]), positions=part_batch.positions,
        counts=[width], cos=cos, sin=sin, views=[native_view(kv, *view) for view in views], at=NO_COLUMNS_10,
        logits=np.empty((1, 0, model.config.vocab_size), np.float32), x=x_1TC[:, part], first_layer=layers[0],
        last_layer=layers[1], exact=batch.past_committed, state_layers=[batch.state_layers[i] for i in state_indices],
        states=states_K1TC,
    )  # fmt: skip
    if states_S1TC is not None and states_K1TC is not None:
        states_S1TC[state_indices, :, part] = states_K1TC
    return mean_distinct_experts


def part_of_pass(config: ModelConfig, start: int, width: int) -> tuple[int, int]:
    """Return the numbers of layers and of tokens of one call, in a pass over tokens [start, start + width) of a row."""
    weights = config.weights_read / config.layers
    token = 2 * weights + 4 * config.heads * config.head_dim * (start + width)
    if token * width <= 1.5 * PART_OPERATIONS:
        return max(1, min(config.layers, int(PART_OPERATIONS / (token * width)))), width
    return 1, max(LEAST_TOKENS, int(PART_OPERATIONS / token) // PAGE * PAGE)

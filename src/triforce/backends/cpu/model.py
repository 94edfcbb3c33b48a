"""A decoder's weights, packed for the native kernels; on demand rounded to 8 or 4 bits. The residual stream is float32.

A pass over native KV memory is one native call; a pass over other memory goes layer by layer.

Shape suffixes as in kernel_api.py; Q = H * D, I MLP size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.backends.cpu import _native
from triforce.backends.cpu.kv import NO_SEARCH, NativeKV, rotations
from triforce.backends.kernel_api import PAGE, ForwardBatch, ForwardOutput, KVBackend, ModelBackend, PageTable
from triforce.backends.torch.model import forward_layerwise
from triforce.distributed.group import TPGroup, span
from triforce.errors import CacheError, ModelError
from triforce.model.config import ModelConfig
from triforce.model.weights import Layer, Matrix, QuantizedWeight, Weights
from triforce.ragged import Bools, Ints
from triforce.sampling.logits import non_finite_logits

L = TypeVar("L")
ROWS = 4096  # of an embedding that are packed at a time
Draws = tuple[_native.Sampler, "_native.Noise | Tensor", Tensor]


class NativeEmbedding:
    """Embedding of some tokens or of all: a table of numbers or of few bits, or a packed matrix."""

    def __init__(self, config: ModelConfig, table_VC: Matrix | _native.Matrix, dtype: torch.dtype) -> None:
        """Raises ModelError."""
        self.config = config
        if isinstance(table_VC, QuantizedWeight):
            require_finite(table_VC)
        scale = float(torch.tensor(config.architecture.embedding_scale, dtype=dtype))
        self.embedding = _native.Embedding(table_VC, scale)

    def embed(self, ids_N: Tensor) -> Tensor:
        x_NC = torch.empty(len(ids_N), self.config.hidden_size)
        self.embedding.rows(ids_N.contiguous(), x_NC)
        return x_NC


class EmbeddingAndHead(NativeEmbedding):
    """Embedding and head, which may be one matrix; of some tokens or of all."""

    width_independent = True

    def __init__(self, config: ModelConfig, weights: Weights, bits: int) -> None:
        """Raises ModelError."""
        with packing("the head", weights.head_VC):
            self._matrix = _native.Matrix(weights.head_VC, bits=bits)
        tied = weights.head_VC is weights.embedding_VC
        super().__init__(config, self._matrix if tied else weights.embedding_VC, weights.head_VC.dtype)
        parts = config.architecture
        self._head = _native.LmHead(
            weights.norm_C, self._matrix, eps=config.norm_eps, logit_scale=parts.logit_scale, logit_cap=parts.logit_cap
        )
        self._tokens = len(weights.head_VC)

    def head_rows(self, ids_N: Tensor) -> Tensor:
        """Return the head's rows of tokens `ids_N`, unpacked: float32 (N, C)."""
        rows_NC = torch.empty(len(ids_N), self.config.hidden_size)
        self._matrix.rows(ids_N.contiguous(), rows_NC)
        return rows_NC

    def head(self, x_NC: Tensor) -> Tensor:
        logits_NV = torch.empty(len(x_NC), self._tokens)
        self._head.logits(x_NC, logits_NV)
        return logits_NV


@contextmanager
def packing(part: str, *weights: Matrix | None) -> Iterator[None]:
    """Release the file pages of `weights` after packing them in this context. Raises ModelError for damaged ones."""
    try:
        yield
    except ValueError as error:
        raise ModelError(f"{part}: {error}; the file is damaged: download it again") from error
    for weight in weights:
        if isinstance(weight, QuantizedWeight):
            weight.release()


def require_finite(embedding_VC: QuantizedWeight) -> None:
    """Check the scales of an embedding that stays in its file, by packing some rows at a time. Raises ModelError."""
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


def native_view(kv: NativeKV, layers: int, lists: PageTable) -> _native.View:
    """Return the view of a memory that `layers` layers have in a pass of one call."""
    return _native.View(
        layers=layers, lists=lists.units, starts=lists.starts, sinks=lists.sinks, window=lists.window,
        coarse=lists.coarse if kv.int8 else [], search=lists.search if lists.search and kv.searches else NO_SEARCH,
    )  # fmt: skip


class NativeModel(EmbeddingAndHead):
    def __init__(self, config: ModelConfig, weights: Weights, bits: int = 0) -> None:
        super().__init__(config, weights, bits)
        self.blocks = packed(NativeLayer, config, weights, bits)
        self.decoder = _native.Decoder(
            [block.native for block in self.blocks], self._head, self.embedding, rotations=config.rotations
        )

    def forward(self, ids_BT: Tensor, kv: KVBackend, batch: ForwardBatch, at_BJ: Tensor | None) -> ForwardOutput:
        if not isinstance(kv, NativeKV):
            return forward_layerwise(self, ids_BT, kv, batch, at_BJ)
        try:
            return self._forward(ids_BT, kv, batch, at_BJ)
        except _native.OffloadError as error:
            raise CacheError(str(error)) from error

    def _forward(self, ids_BT: Tensor, kv: NativeKV, batch: ForwardBatch, at_BJ: Tensor | None) -> ForwardOutput:
        B, T = ids_BT.shape
        config = self.config
        logits_BJV = torch.empty(B, T if at_BJ is None else at_BJ.shape[1], config.vocab_size)
        queries_LBTHD = mass_LBGU = states_SBTC = None
        if batch.observe:
            queries_LBTHD = torch.empty(config.layers, B, T, config.heads, config.head_dim, dtype=kv.dtype)
        if batch.return_mass:
            mass_LBGU = torch.empty(config.layers, B, config.kv_heads, batch.views[0][1].units.shape[-1])
        if batch.states:
            states_SBTC = torch.empty(len(batch.states), B, T, config.hidden_size)
        rope = config.rope
        cos, sin = rope.tables_SF if max(batch.positions) + T <= rope.covered else rotations(rope, batch, T)
        touched = self.decoder.forward(
            memory=kv.native_pages, ids=ids_BT.contiguous(), positions=batch.positions,
            counts=batch.views[0][1].counts, cos=cos, sin=sin, views=[native_view(kv, *view) for view in batch.views],
            at=at_BJ, logits=logits_BJV, queries=queries_LBTHD, mass=mass_LBGU, exact=batch.exact, keep=batch.keep,
            state_layers=batch.states, states=states_SBTC,
        )  # fmt: skip
        return ForwardOutput(logits_BJV, queries_LBTHD, mass_LBGU, states_SBTC, touched)

    def fused_draft(
        self, kv: NativeKV, batch: ForwardBatch, texts: tuple[Ints, Ints, Bools], draws: Draws, tokens_BK: Ints
    ) -> Tensor:
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
        return probs.transpose(0, 1)


class NativeLayer:
    def __init__(self, config: ModelConfig, layer: Layer, bits: int) -> None:
        self.config = config
        self.dtype = layer.o_proj_CQ.dtype
        parts = config.architecture
        self.native = _native.DecoderLayer(
            layer.input_norm_C, layer.q_proj_QC, layer.k_proj_PC, layer.v_proj_PC, layer.o_proj_CQ, layer.post_norm_C,
            layer.gate_proj_IC, layer.up_proj_IC, layer.down_proj_CI, layer.q_bias_Q, layer.k_bias_P, layer.v_bias_P,
            layer.q_norm_D, layer.k_norm_D, attn_out_norm=layer.attn_out_norm_C, mlp_out_norm=layer.mlp_out_norm_C,
            head_dim=config.head_dim, eps=config.norm_eps, bits=bits, query_scale=parts.query_scale,
            residual_scale=parts.residual_scale, activation=parts.activation,
            o_bias=layer.o_bias_C, gate_bias=layer.gate_bias_I, up_bias=layer.up_bias_I, down_bias=layer.down_bias_C,
            experts=experts(config, layer, bits) if layer.experts else None,
        )  # fmt: skip

    def qkv(self, x_NC: Tensor) -> tuple[Tensor, ...]:
        return project(self.native, self.config, x_NC)

    def finish(self, x_NC: Tensor, attn_out_NQ: Tensor) -> int:
        return self.native.finish(x_NC, attn_out_NQ.to(self.dtype))


def project(
    native: _native.DecoderLayer | _native.QkvProjections, config: ModelConfig, x_NC: Tensor
) -> tuple[Tensor, ...]:
    """Return queries (N, H, D), keys and values (N, G, D)."""
    N = len(x_NC)
    H = config.heads
    G = config.kv_heads
    D = config.head_dim
    q = torch.empty(N, H * D)
    k = torch.empty(N, G * D)
    v = torch.empty(N, G * D)
    native.qkv(x_NC, q, k, v)
    return q.view(N, H, D), k.view(N, G, D), v.view(N, G, D)


def experts(config: ModelConfig, layer: Layer, bits: int) -> _native.Experts:
    """Return the packed experts of a layer with experts."""
    parts = config.architecture.experts
    assert parts is not None and layer.router_EC is not None
    projections = {
        f"{part}_projs": [getattr(expert, f"{part}_proj_{shape}") for expert in layer.experts]
        for part, shape in (("gate", "IC"), ("up", "IC"), ("down", "CI"))
    }
    biases = {
        f"{part}_biases": [getattr(expert, f"{part}_bias_{shape}") for expert in layer.experts]
        for part, shape in (("gate", "I"), ("up", "I"), ("down", "C"))
        if parts.biases
    }
    return _native.Experts(
        layer.post_norm_C, router=layer.router_EC, router_bias=layer.router_bias_E,
        correction=layer.router_correction_E, **projections, **biases, eps=config.norm_eps, bits=bits,
        activation=config.architecture.activation, chosen=parts.chosen, sigmoid=parts.function == "sigmoid",
        renormalised=parts.renormalised, scale=parts.scale, groups=parts.groups, chosen_groups=parts.chosen_groups,
    )  # fmt: skip


class NativeModelShard(EmbeddingAndHead):
    """Native weights of one rank. `config` has this rank's heads."""

    def __init__(self, config: ModelConfig, weights: Weights, bits: int = 0) -> None:
        super().__init__(config, weights, bits)
        self.blocks = packed(NativeLayerShard, config, weights, bits)


class NativeLayerShard:
    def __init__(self, config: ModelConfig, layer: Layer, bits: int) -> None:
        self.config = config
        parts = config.architecture
        eps = config.norm_eps
        q_norm, k_norm = (None, None) if parts.qk_norm == "row" else (layer.q_norm_D, layer.k_norm_D)
        self._query_scale = parts.query_scale if parts.qk_norm == "row" else 1.0
        """Factor of the queries that is applied after norms of whole rows; 1 where products apply it."""
        self._projections = _native.QkvProjections(
            layer.input_norm_C, layer.q_proj_QC, layer.k_proj_PC, layer.v_proj_PC, layer.q_bias_Q, layer.k_bias_P,
            layer.v_bias_P, q_norm, k_norm, head_dim=config.head_dim, eps=eps, bits=bits,
            query_scale=parts.query_scale / self._query_scale,
        )  # fmt: skip
        norm_weights = layer.q_norm_D, layer.k_norm_D, layer.attn_out_norm_C, layer.mlp_out_norm_C
        self._q_norm, self._k_norm, self._attn_out_norm, self._mlp_out_norm = (
            None if norm_weight is None else _native.Norm(norm_weight, eps=eps) for norm_weight in norm_weights
        )
        self._out = Product(layer.o_proj_CQ, layer.o_bias_C, bits)
        self._mlp = ExpertsShard(config, layer, bits) if layer.experts else MlpShard(config, layer, bits)

    def qkv(self, x_NC: Tensor, ranks: TPGroup) -> tuple[Tensor, ...]:
        q_NHD, k_NGD, v_NGD = project(self._projections, self.config, x_NC)
        if self._q_norm and self._k_norm and self.config.architecture.qk_norm == "row":
            q_NHD = _of_rows(q_NHD, self._q_norm, ranks)
            k_NGD = _of_rows(k_NGD, self._k_norm, ranks)
        return q_NHD.mul_(self._query_scale), k_NGD, v_NGD

    def finish(self, x_NC: Tensor, attn_out_NQ: Tensor, ranks: TPGroup) -> int:
        self._add(x_NC, self._out(ranks.inputs(attn_out_NQ, self._out.inputs)), self._attn_out_norm, ranks)
        part_NC, touched = self._mlp(x_NC, ranks)
        self._add(x_NC, part_NC, self._mlp_out_norm, ranks)
        return touched

    def _add(self, x_NC: Tensor, part_NC: Tensor, norm: _native.Norm | None, ranks: TPGroup) -> None:
        """Add all ranks' outputs to the residual stream, rounded where one process rounds its products."""
        part_NC = ranks.outputs(part_NC, x_NC.shape[1])
        if norm:
            norm.forward(part_NC)
        x_NC += part_NC.mul_(self.config.architecture.residual_scale)


class Product:
    """Product with one rank's part of a matrix: some outputs, with their biases, from all inputs or some."""

    def __init__(self, weight: Matrix, bias: Tensor | None, bits: int) -> None:
        self._outputs, self.inputs = weight.shape
        self._dtype = weight.dtype
        self._native = _native.Matrix(weight, bits=bits)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.empty(len(x), self._outputs)
        self._native.linear(x.to(self._dtype).contiguous(), y)
        return y if self._bias is None else y.add_(self._bias)


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
        self._gated = len(gate_IC)
        self._dtype = gate_IC.dtype
        self._down = Product(down_CI, layer.down_bias_C, bits)

    def __call__(self, x_NC: Tensor, ranks: TPGroup) -> tuple[Tensor, int]:
        """Return this rank's outputs (N, some of C), and 0 experts touched."""
        gated_NI = torch.empty(len(x_NC), self._gate.stride, dtype=self._dtype)
        self._gate.forward(x_NC, gated_NI)
        return self._down(ranks.inputs(gated_NI[:, : self._gated], self._down.inputs)), 0


class ExpertsShard:
    def __init__(self, config: ModelConfig, layer: Layer, bits: int) -> None:
        parts = config.architecture.experts
        first_expert = layer.experts[0]
        assert parts is not None
        self._native = experts(config, layer, bits)
        self._per_row = parts.active
        self._gated = len(first_expert.gate_proj_IC)
        self._dtype = first_expert.gate_proj_IC.dtype
        self._outputs, self._inputs = first_expert.down_proj_CI.shape

    def __call__(self, x_NC: Tensor, ranks: TPGroup) -> tuple[Tensor, int]:
        """Return this rank's outputs (N, some of C), and the experts touched. Ranks exchange once for all experts."""
        gated_MI = torch.empty(len(x_NC) * self._per_row, self._native.stride, dtype=self._dtype)
        choices = self._native.gate(x_NC, gated_MI)
        read_MI = ranks.inputs(gated_MI[:, : self._gated], self._inputs)
        sum_NC = torch.empty(len(x_NC), self._outputs)
        self._native.down(choices, F.pad(read_MI, (0, -self._inputs % 16)).contiguous(), sum_NC)
        return sum_NC, choices.touched


def _of_rows(x_NHD: Tensor, norm: _native.Norm, ranks: TPGroup) -> Tensor:
    """Norm whole rows over the heads of all ranks; return this rank's heads (N, H, D)."""
    rank_NQ = x_NHD.flatten(1)
    all_NQ = ranks.gather(rank_NQ, rank_NQ.shape[1] * ranks.count)
    norm.forward(all_NQ)
    return all_NQ[:, span(all_NQ.shape[1], ranks)].contiguous().view(x_NHD.shape)


PART_OPERATIONS = 6e10
"""Approximate operations of a call that runs a part of a prompt's pass: .06 to .4 seconds of two cores."""

LEAST_TOKENS = 128
"""Least tokens of such a call: with fewer, reading the weights again takes more time than shorter calls save."""


def steps(
    model: ModelBackend, kv: KVBackend, ids_1T: Tensor, batch: ForwardBatch
) -> Generator[int, None, ForwardOutput] | None:
    """Return the parts of a pass over many unscored tokens of one row; None for a model of other kernels.

    With offloaded KV, which is read ahead in a pass of one call, the whole pass is one part.
    """
    if not isinstance(model, NativeModel):
        return None
    return parts(model, kv, ids_1T, batch) if type(kv) is NativeKV else _one_part(model, kv, ids_1T, batch)


def _one_part(
    model: NativeModel, kv: KVBackend, ids_1T: Tensor, batch: ForwardBatch
) -> Generator[int, None, ForwardOutput]:
    yield from ()
    return model.forward(ids_1T, kv, batch, torch.empty(1, 0, dtype=torch.long))


def parts(model: NativeModel, kv: NativeKV, ids_1T: Tensor, batch: ForwardBatch) -> Generator[int, None, ForwardOutput]:
    """Run a pass over many unscored tokens of one row in calls of about `PART_OPERATIONS` operations at most.

    A call takes all tokens through several layers, or some tokens through one layer. Each token has the bits of a pass
    in one call. Yields after each call the tokens that all work so far is worth.
    """
    _, T = ids_1T.shape
    config = model.config
    x_1TC = torch.empty(1, T, config.hidden_size)
    states_S1TC = None
    if batch.states:
        states_S1TC = torch.empty(len(batch.states), 1, T, config.hidden_size)
    touched = list[tuple[float, int]]()
    layers, tokens = part_of_pass(config, batch.positions[0], T)
    for layer in range(0, config.layers, layers):
        stop = min(layer + layers, config.layers)
        for first_token in range(0, T, tokens):
            part = slice(first_token, min(first_token + tokens, T))
            experts = _forward_part(model, kv, ids_1T, batch, (layer, stop), part, x_1TC, states_S1TC)
            touched += [(experts, stop - layer)] * (experts > 0 and first_token == 0)
            yield (layer * T + part.stop * (stop - layer)) // config.layers
    mean = sum(experts * count for experts, count in touched) / max(1, sum(count for _, count in touched))
    return ForwardOutput(torch.empty(1, 0, config.vocab_size), None, None, states_S1TC, mean)


def _forward_part(
    model: NativeModel,
    kv: NativeKV,
    ids_1T: Tensor,
    batch: ForwardBatch,
    layers: tuple[int, int],
    part: slice,
    x_1TC: Tensor,
    states_S1TC: Tensor | None,
) -> float:
    """Take tokens `part` of a row through layers [start, stop), in place. Returns the experts touched, as a pass does.

    Residual streams after these layers that `batch.states` names go to `states_S1TC`.
    """
    first_token = part.start
    width = part.stop - part.start
    part_batch = replace(batch, positions=[batch.positions[0] + first_token])
    views = [(count, replace(lists, starts=[lists.starts[0] + first_token])) for count, lists in batch.views]
    state_indices = [i for i, depth in enumerate(batch.states) if layers[0] < depth <= layers[1]]
    states_K1TC = torch.empty(len(state_indices), 1, width, model.config.hidden_size) if state_indices else None
    cos, sin = rotations(model.config.rope, part_batch, width)
    experts = model.decoder.forward(
        memory=kv.native_pages, ids=ids_1T[:, part].contiguous(), positions=part_batch.positions, counts=[width],
        cos=cos, sin=sin, views=[native_view(kv, *view) for view in views], at=torch.empty(1, 0, dtype=torch.long),
        logits=torch.empty(1, 0, model.config.vocab_size), x=x_1TC[:, part], first_layer=layers[0],
        last_layer=layers[1], exact=batch.exact, state_layers=[batch.states[i] for i in state_indices],
        states=states_K1TC,
    )  # fmt: skip
    if states_S1TC is not None and states_K1TC is not None:
        states_S1TC[state_indices, :, part] = states_K1TC
    return experts


def part_of_pass(config: ModelConfig, start: int, width: int) -> tuple[int, int]:
    """Return the layers and the tokens of one call, in a pass over tokens [start, start + width) of a row."""
    weights = config.weights_read / config.layers
    token = 2 * weights + 4 * config.heads * config.head_dim * (start + width)
    if token * width <= 1.5 * PART_OPERATIONS:
        return max(1, min(config.layers, int(PART_OPERATIONS / (token * width)))), width
    return 1, max(LEAST_TOKENS, int(PART_OPERATIONS / token) // PAGE * PAGE)

"""A decoder's weights, packed for the native kernels; on demand rounded to 8 or 4 bits. The residual stream is float32.

A pass over native KV memory is one native call, over any other it goes layer by layer.

Shape suffixes as in kernel_api.py; Q = H * D, I MLP size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from triforce.backends.cpu import _native
from triforce.backends.cpu.kv import NativeKV, offload_errors, rotations
from triforce.backends.kernel_api import ForwardBatch, ForwardOutput, KVBackend
from triforce.backends.torch.model import forward_layerwise
from triforce.errors import ModelError
from triforce.model.config import ModelConfig
from triforce.model.weights import Layer, Matrix, QuantizedWeight, Weights
from triforce.ragged import Bools, Ints
from triforce.sampling.logits import non_finite_logits

L = TypeVar("L")
ROWS = 4096  # of a table that are packed at a time
Draws = tuple[_native.Sampler, "_native.Noise | Tensor", Tensor]


class NativeEmbedding:
    """The embedding of some tokens or of all: a table of numbers or of few bits, or a packed matrix."""

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
        """Return the rows of these tokens in the head as numbers, whatever it is packed to: float32 (N, C)."""
        rows_NC = torch.empty(len(ids_N), self.config.hidden_size)
        self._matrix.rows(ids_N.contiguous(), rows_NC)
        return rows_NC

    def head(self, x_NC: Tensor) -> Tensor:
        logits_NV = torch.empty(len(x_NC), self._tokens)
        self._head.logits(x_NC, logits_NV)
        return logits_NV


@contextmanager
def packing(part: str, *weights: Matrix | None) -> Iterator[None]:
    """Let weights that were packed leave memory, where they lie in a file. Raises ModelError for what cannot be."""
    try:
        yield
    except ValueError as error:
        raise ModelError(f"{part}: {error}; the file is damaged: download it again") from error
    for weight in weights:
        if isinstance(weight, QuantizedWeight):
            weight.release()


def require_finite(embedding_VC: QuantizedWeight) -> None:
    """Pack a table that stays in its file, some rows at a time, for the check of its scales. Raises ModelError."""
    with packing("the embedding", embedding_VC):
        for first in range(0, len(embedding_VC), ROWS):
            _native.Matrix(embedding_VC.part(slice(first, first + ROWS)))


def packed(make: Callable[[ModelConfig, Layer, int], L], config: ModelConfig, weights: Weights, bits: int) -> list[L]:
    """Pack each layer. Raises ModelError."""
    blocks = []
    for i, layer in enumerate(weights.layers):
        with packing(f"layer {i}", *layer.weights()):
            blocks.append(make(config, layer, bits))
    return blocks


class NativeModel(EmbeddingAndHead):
    def __init__(self, config: ModelConfig, weights: Weights, bits: int = 0) -> None:
        super().__init__(config, weights, bits)
        self.blocks = packed(NativeLayer, config, weights, bits)
        self.decoder = _native.Decoder(
            [block.native for block in self.blocks], self._head, self.embedding, rotations=config.rotations
        )

    @offload_errors()
    def forward(self, ids_BT: Tensor, kv: KVBackend, batch: ForwardBatch, at_BJ: Tensor | None) -> ForwardOutput:
        if not isinstance(kv, NativeKV):
            return forward_layerwise(self, ids_BT, kv, batch, at_BJ)
        (B, T), config = ids_BT.shape, self.config
        logits_BJV = torch.empty(B, T if at_BJ is None else at_BJ.shape[1], config.vocab_size)
        queries_LBTHD = mass_LBGU = states_SBTC = None
        if batch.observe:
            queries_LBTHD = torch.empty(config.layers, B, T, config.heads, config.head_dim, dtype=kv.dtype)
        if batch.return_mass:
            mass_LBGU = torch.empty(config.layers, B, config.kv_heads, batch.views[0][1].units.shape[-1])
        if batch.states:
            states_SBTC = torch.empty(len(batch.states), B, T, config.hidden_size)
        cos, sin = rotations(config.rope, batch, T)
        touched = self.decoder.forward(
            memory=kv.native_pages, ids=ids_BT.contiguous(), positions=batch.positions,
            counts=batch.views[0][1].counts, cos=cos, sin=sin, views=[kv.native_view(*view) for view in batch.views],
            at=at_BJ, logits=logits_BJV, queries=queries_LBTHD, mass=mass_LBGU, exact=batch.exact, keep=batch.keep,
            state_layers=batch.states, states=states_SBTC,
        )  # fmt: skip
        return ForwardOutput(logits_BJV, queries_LBTHD, mass_LBGU, states_SBTC, touched)

    def fused_draft(
        self, kv: NativeKV, batch: ForwardBatch, texts: tuple[Ints, Ints, Bools], draws: Draws, tokens_BK: Ints
    ) -> Tensor:
        """K tokens behind each text, one after another in one call, as so many passes and draws would give them.

        batch: the first pass, from which the others go on. texts: ids (B, S) with room for the tokens, which are
        written there too, lengths, and which rows are live. draws: sampler, noise, and where laws go, as in
        `_native.fused_draft`. Returns the laws (B, K, V). Raises ModelError where a token has none.
        """
        (view,), (sampler, noise, laws), (ids_BS, lengths_B, live_B) = batch.views, draws, texts
        longest = int((lengths_B - np.array(batch.positions)).max()) + tokens_BK.shape[1]
        cos, sin = rotations(self.config.rope, batch, longest)
        drafted = _native.DraftedTexts(
            positions=batch.positions, cos=cos, sin=sin, view=kv.native_view(*view), ids=ids_BS, lengths=lengths_B,
            live=live_B, sampler=sampler, noise=noise, probs=laws, tokens=tokens_BK,
        )  # fmt: skip
        unlawful = _native.fused_draft(decoder=self.decoder, memory=kv.native_pages, texts=drafted)
        if unlawful:
            raise non_finite_logits(unlawful[0], 0, unlawful[1])
        return laws.transpose(0, 1)


class NativeLayer:
    def __init__(self, config: ModelConfig, layer: Layer, bits: int) -> None:
        self.config, self.dtype = config, layer.o_proj_CQ.dtype
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
    """Queries (N, H, D), keys and values (N, G, D)."""
    N, (H, G, D) = len(x_NC), (config.heads, config.kv_heads, config.head_dim)
    q, k, v = torch.empty(N, H * D), torch.empty(N, G * D), torch.empty(N, G * D)
    native.qkv(x_NC, q, k, v)
    return q.view(N, H, D), k.view(N, G, D), v.view(N, G, D)


def experts(config: ModelConfig, layer: Layer, bits: int) -> _native.Experts:
    """Return the experts of a layer that has some, packed."""
    parts = config.architecture.experts
    assert parts is not None and layer.router_EC is not None
    projections = {
        f"{part}_projs": [getattr(each, f"{part}_proj_{shape}") for each in layer.experts]
        for part, shape in (("gate", "IC"), ("up", "IC"), ("down", "CI"))
    }
    biases = {
        f"{part}_biases": [getattr(each, f"{part}_bias_{shape}") for each in layer.experts]
        for part, shape in (("gate", "I"), ("up", "I"), ("down", "C"))
        if parts.biases
    }
    return _native.Experts(
        layer.post_norm_C, router=layer.router_EC, router_bias=layer.router_bias_E,
        correction=layer.router_correction_E, **projections, **biases, eps=config.norm_eps, bits=bits,
        activation=config.architecture.activation, chosen=parts.chosen, sigmoid=parts.function == "sigmoid",
        renormalised=parts.renormalised, scale=parts.scale, groups=parts.groups, chosen_groups=parts.chosen_groups,
    )  # fmt: skip

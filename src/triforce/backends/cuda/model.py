"""A decoder's weights for the Triton kernels.

Matrix products are torch's; each operation between two products is one Triton kernel. Products with quantized weights
are Triton kernels, too; quantized matrices are not joined.

A pass over Triton KV is a function over the buffers of a `GraphInputs`. A narrow pass runs at the shape of its bucket,
on a CUDA device as a graph that was captured once. A wide pass is prefill: torch's fused attention, row by row, at its
own shape. Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.arrays import Array
from triforce.arrays import on_device as tensor_on_device
from triforce.backends.cuda.graphs import GraphInputs, Graphs, PassInputs, PassShape, Replay, shape_of
from triforce.backends.cuda.kv import TritonKV
from triforce.backends.cuda.packed_weight import PackedWeight, on_device
from triforce.backends.cuda.sampler import DraftDraws
from triforce.backends.cuda.triton.draft_step import advance_draft
from triforce.backends.cuda.triton.pointwise import norm, swiglu
from triforce.backends.cuda.triton.rng import uniforms
from triforce.backends.cuda.triton.sampler import SamplerInputs, by_race, by_rejection
from triforce.backends.cuda.triton.weight_tiles import rows_of, times
from triforce.backends.current_device import device_context
from triforce.backends.kernel_api import ForwardBatch, ForwardOutput, KVBackend, ModelBackend, PageTable
from triforce.backends.layerwise import forward_layers, forward_layerwise
from triforce.backends.torch.kv import MAX_NARROW_WIDTH
from triforce.backends.torch.logits_processor import check
from triforce.backends.torch.model import TorchLayer, TorchModel, linear
from triforce.backends.torch.tensors import torch_dtype
from triforce.distributed.group import ALONE, TPGroup
from triforce.model.config import ModelConfig
from triforce.model.weights import Layer, Matrix, QuantizedWeight, Weights
from triforce.ragged import Bools, Ints, columns, ints, rows


def product(x: Tensor, weight: Matrix | None, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, (N, M), of any kind of matrix."""
    return times(x, weight, bias) if isinstance(weight, PackedWeight) else linear(x, weight, bias)


class TritonLayer(TorchLayer):
    """Layer with one product for q, k and v, and one for gate and up; its matrices become views of joined ones."""

    norm = staticmethod(norm)
    swiglu = staticmethod(swiglu)
    linear = staticmethod(product)

    def __init__(self, config: ModelConfig, layer: Layer) -> None:
        super().__init__(config, layer)
        self._qkv = joined(layer.q_proj_QC, layer.k_proj_PC, layer.v_proj_PC)
        self._qkv_bias = joined(layer.q_bias_Q, layer.k_bias_P, layer.v_bias_P)
        self._gate_up = joined(layer.gate_proj_IC, layer.up_proj_IC)
        self._gate_up_bias = joined(layer.gate_bias_I, layer.up_bias_I)

    def qkv(self, x_NC: Tensor, ranks: TPGroup = ALONE) -> tuple[Tensor, ...]:
        if self._qkv is None:
            return super().qkv(x_NC, ranks)
        layer = self.layer
        H = self.config.heads
        G = self.config.kv_heads
        eps = self.config.norm_eps
        qkv_NMD = F.linear(self._normed(x_NC, layer.input_norm_C), self._qkv, self._qkv_bias)
        qkv_NMD = qkv_NMD.view(len(x_NC), H + 2 * G, self.config.head_dim)
        q_NHD, k_NGD, v_NGD = torch.split(qkv_NMD, [H, G, G], dim=1)
        if layer.q_norm_D is None or layer.k_norm_D is None:
            return q_NHD, k_NGD, v_NGD
        return self.norm(q_NHD, layer.q_norm_D, eps), self.norm(k_NGD, layer.k_norm_D, eps), v_NGD

    def gate(self, x_NC: Tensor) -> Tensor:
        if self._gate_up is None:
            return super().gate(x_NC)
        y_NC = self._normed(x_NC, self.layer.post_norm_C)
        return self.swiglu(*F.linear(y_NC, self._gate_up, self._gate_up_bias).chunk(2, dim=1))


def joined(*parts: Matrix | None) -> Tensor | None:
    """Join the rows of matrices (M, C) or vectors (M,) into one tensor; `parts` become views of it.

    None where all parts are None, or where any part is quantized.
    """
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if not tensors or any(isinstance(part, QuantizedWeight) for part in parts):
        return None
    joined_rows = torch.cat(tensors)
    for part, part_rows in zip(tensors, torch.split(joined_rows, [len(part) for part in tensors]), strict=True):
        part.data = part_rows
    return joined_rows


class TritonModel(TorchModel):
    """Model with captured passes for each KV memory, kept as long as the memory lives."""

    block = TritonLayer
    upload = staticmethod(on_device)

    def __init__(self, config: ModelConfig, weights: Weights, device: str = "cpu") -> None:
        super().__init__(config, weights, device)
        self._graphs_by_kv: WeakKeyDictionary[TritonKV, tuple[int, Graphs]] = WeakKeyDictionary()

    def embed(self, ids_N: Array) -> Tensor:
        table_VC = self.weights.embedding_VC
        if not isinstance(table_VC, PackedWeight):
            return super().embed(ids_N)
        ids_N = tensor_on_device(ids_N, table_VC.blocks.device)
        return rows_of(table_VC, ids_N, torch_dtype(table_VC.dtype))

    def head_rows(self, ids_N: Array) -> Tensor:
        head_VC = self.weights.head_VC
        if not isinstance(head_VC, PackedWeight):
            return super().head_rows(ids_N)
        return rows_of(head_VC, tensor_on_device(ids_N, head_VC.blocks.device), torch.float32)

    @torch.no_grad()
    def forward(self, ids_BT: Ints, kv: KVBackend, batch: ForwardBatch, at_BJ: Ints | None) -> ForwardOutput:
        return self.run(self, ids_BT, kv, batch, at_BJ)

    def run(
        self, model: ModelBackend, ids_BT: Ints, kv: KVBackend, batch: ForwardBatch, at_BJ: Ints | None
    ) -> ForwardOutput:
        """Run `ModelBackend.forward` for `model`, which is made of this model's layers."""
        if not isinstance(kv, TritonKV):
            return forward_layerwise(model, ids_BT, kv, batch, at_BJ)
        kv.prepare(batch, ids_BT.shape[1])
        B, T = ids_BT.shape
        if at_BJ is None:
            at_BJ = np.broadcast_to(np.arange(T), (B, T))
        shape = shape_of(B, T, at_BJ.shape[1], batch, padded=T <= MAX_NARROW_WIDTH)
        if T > MAX_NARROW_WIDTH or batch.trial or batch.state_layers:
            inputs = GraphInputs(shape, kv.device)
            inputs.fill(ids_BT, at_BJ, batch)
            wide = T > MAX_NARROW_WIDTH and not (batch.return_mass or batch.views[0][1].window)
            output = run_pass(model, kv, inputs, batch.layer_tables() if wide else None, batch.state_layers)
            return output if T > MAX_NARROW_WIDTH else _cut(output, B, T, at_BJ.shape[1], batch)
        graphs = self.graphs(kv)
        captured: Replay[GraphInputs, ForwardOutput] = graphs.get(shape, lambda: Replay(GraphInputs(shape, kv.device)))
        captured.inputs.fill(ids_BT, at_BJ, batch)
        run = partial(run_pass, model, kv, captured.inputs)
        output = graphs.run(captured, run) if kv.capturable else run()
        return _cut(output, B, T, at_BJ.shape[1], batch)

    def graphs(self, kv: TritonKV) -> Graphs:
        """Return the captured passes over `kv`; a new collection where its tensors have moved."""
        version, graphs = self._graphs_by_kv.get(kv, (-1, None))
        if graphs is None or version != kv.version:
            graphs = Graphs(kv.device)
            self._graphs_by_kv[kv] = kv.version, graphs
        return graphs


def run_pass(
    model: ModelBackend,
    kv: TritonKV,
    inputs: PassInputs,
    wide_tables: list[PageTable] | None = None,
    state_layers: tuple[int, ...] = (),
) -> ForwardOutput:
    """Run a pass as a function of the inputs' buffers.

    wide_tables: each layer's page table for torch's fused attention; None: Triton attention. state_layers: as in
    `ForwardBatch`, for passes that are not captured.
    """
    attention = kv.device_attention(inputs, wide_tables)
    shape = inputs.shape
    return forward_layers(model, inputs.ids_BT, inputs.at_BJ, attention, shape.observe, shape.return_mass, state_layers)


def _cut(padded: ForwardOutput, rows: int, width: int, columns: int, batch: ForwardBatch) -> ForwardOutput:
    """Return a copy of an output without its bucket's padding; the next pass of this shape overwrites `padded`."""
    logits_BJV, queries_LBTHD, mass_LBGU, states_SBTC, mean_distinct_experts = padded
    return ForwardOutput(
        logits_BJV[:rows, :columns].clone(),
        queries_LBTHD[:, :rows, :width].clone() if queries_LBTHD is not None else None,
        mass_LBGU[:, :rows, :, : batch.views[0][1].units.shape[-1]].clone() if mass_LBGU is not None else None,
        states_SBTC[:, :rows, :width].clone() if states_SBTC is not None else None,
        mean_distinct_experts,
    )


class DraftShape(NamedTuple):
    """Shape of a draft: all that its launches depend on.

    race: whether tokens are drawn by exponential races (`seeded`) or from uniforms. tier: the tier whose uniforms are
    drawn.
    """

    first_pass: PassShape
    tokens: int
    race: bool
    tier: int


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """Drawn tokens, and the largest logit of each token's column as the bits of a float64: int64 (2, K, B).

    probs: the distribution of each token (B, 1, V); empty for draws by a race.
    """

    drawn_2KB: Tensor
    probs: list[Tensor]


class DraftInputs:
    """Buffers of one draft shape: of the first pass, and of the sampler for all tokens."""

    def __init__(self, shape: DraftShape, device: str) -> None:
        B = shape.first_pass.rows
        self.shape = shape
        self.first_pass = GraphInputs(shape.first_pass, device, extra=2)
        self.zeros_B1 = torch.zeros(B, 1, dtype=torch.int64, device=device)
        self.settings_5B = torch.ones(5, B, dtype=torch.float64, device=device)
        self.seeds_B, self.choices_B, self.draws_B = (
            torch.zeros(B, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._loaded_settings_5B: Tensor | None = None

    def fill(self, batch: ForwardBatch, texts: tuple[Ints, Ints, Bools], draws: DraftDraws) -> None:
        """Copy a draft's texts, which must fit, into the buffers, and its sampler's settings if they have changed."""
        ids_BS, lengths_B, live_B = texts
        B = self.shape.first_pass.rows
        ids_BT, at_BJ = _uncached_tokens(ids_BS, batch)
        places_2B = np.full((2, B), -1)
        places_2B[0, : len(live_B)] = lengths_B
        places_2B[1, : len(live_B)] = np.where(live_B, 0, -1)
        self.first_pass.fill(ids_BT, at_BJ, batch, places_2B)
        batch_rows = slice(len(live_B))
        if draws.settings_5B is not self._loaded_settings_5B:
            self._loaded_settings_5B = draws.settings_5B
            self.settings_5B[:, batch_rows] = draws.settings_5B
            self.seeds_B[batch_rows] = draws.seeds_B
            self.choices_B[batch_rows] = draws.choices_B
        if draws.offsets_B is not None:
            self.draws_B[batch_rows] = draws.offsets_B


def fused_draft_for(model: ModelBackend, kv: KVBackend, width: int) -> Callable[..., Tensor] | None:
    """Return `fused_draft` of `model` and `kv`, or None unless passes of `width` tokens a row are captured."""
    if width <= MAX_NARROW_WIDTH and isinstance(model, TritonModel) and isinstance(kv, TritonKV):
        return partial(fused_draft, model, kv)
    return None


def fused_draft(
    model: TritonModel, kv: TritonKV, batch: ForwardBatch, texts: tuple[Ints, Ints, Bools], draws: DraftDraws,
    tokens_BK: Ints,
) -> Tensor:  # fmt: skip
    """Draft K tokens after each text into `tokens_BK`; return their distributions, float64 (B, K, V).

    V is 0 for draws by a race. batch: the first pass, from which the others follow. texts: ids (B, S), lengths, and a
    mask of live rows. The host waits once. Raises ModelError where logits are not finite.
    """
    B, K = tokens_BK.shape
    _, lengths_B, live_B = texts
    counts_B = (lengths_B - np.array(batch.positions)) * live_B
    layers, page_table = batch.views[0]
    T = int(counts_B.max())
    batch = replace(batch, views=[(layers, replace(page_table, counts=counts_B.tolist()))])
    kv.prepare(batch, T + K - 1)
    shape = DraftShape(shape_of(B, T, 1, batch, padded=True), K, draws.offsets_B is None, draws.tier)
    with device_context(kv.device):
        graphs = model.graphs(kv)
        captured: Replay[DraftInputs, DrawnTokens] = graphs.get(shape, lambda: Replay(DraftInputs(shape, kv.device)))
        captured.inputs.fill(batch, texts, draws)
        output = graphs.run(captured, partial(run_draft, model, kv, captured.inputs))
        probs_BKV = torch.cat(output.probs, 1)[:B] if output.probs else torch.empty(B, K, 0, dtype=torch.float64)
        drawn_2KB = output.drawn_2KB.cpu()  # the host waits
    tokens_KB, peaks_KB = drawn_2KB[:, :, :B]
    for peaks_B in peaks_KB.view(torch.float64):  # in order, because values after a non-finite value are undefined
        check(peaks_B[:, None])
    tokens_BK[:] = tokens_KB.T.numpy()
    return probs_BKV


def run_draft(model: TritonModel, kv: TritonKV, inputs: DraftInputs) -> DrawnTokens:
    """Run a draft as a function of the inputs' buffers."""
    shape = inputs.shape
    places_2B = inputs.first_pass.extra_XB
    probs = list[Tensor]()
    pass_inputs: PassInputs = inputs.first_pass
    drawn_2KB = places_2B.new_empty(2, shape.tokens, shape.first_pass.rows)
    uniforms_KB: Tensor | None = None
    if not shape.race:
        uniforms_BK = uniforms(inputs.seeds_B, inputs.choices_B, inputs.draws_B, shape.tier, shape.tokens)
        uniforms_KB = uniforms_BK.T.contiguous()
    for step in range(shape.tokens):
        logits_B1V = run_pass(model, kv, pass_inputs).logits_BJV
        sampler_inputs = SamplerInputs(logits_B1V, inputs.settings_5B, places_2B)
        if uniforms_KB is None:
            decided_2B1 = by_race(sampler_inputs, inputs.seeds_B, inputs.choices_B)
        else:
            nothing_B0V = torch.empty_like(logits_B1V[:, :0], dtype=torch.float64)
            decided_2B1, probs_B1V = by_rejection(
                sampler_inputs, inputs.zeros_B1[:, :0], nothing_B0V, uniforms_KB[step][:, None]
            )
            probs.append(probs_B1V)
        next_XB = advance_draft(decided_2B1, pass_inputs, places_2B, drawn_2KB, step)
        pass_inputs = _next_pass(pass_inputs, next_XB, inputs.zeros_B1)
        places_2B = next_XB[4:]
    return DrawnTokens(drawn_2KB, probs)


def _next_pass(pass_inputs: PassInputs, next_XB: Tensor, zeros_B1: Tensor) -> PassInputs:
    """Return the inputs of the following pass, of one token a row."""
    tokens_B, positions_B, counts_B, starts_B, *_ = next_XB
    shape = replace(pass_inputs.shape, width=1, columns=1)
    return PassInputs(shape, tokens_B[:, None], zeros_B1, positions_B, counts_B, [starts_B], pass_inputs.units)


def _uncached_tokens(ids_BS: Ints, batch: ForwardBatch) -> tuple[Ints, Ints]:
    """Return ids (B, T) of the tokens that the first pass feeds, and the column (B, 1) of each row's last token."""
    positions_B, counts_B = (ints(row_values) for row_values in (batch.positions, batch.views[0][1].counts))
    at_BT = np.minimum(columns(positions_B, int(counts_B.max())), ids_BS.shape[1] - 1)
    ids_BT = ids_BS[rows(len(at_BT)), at_BT]
    at_BJ = np.maximum(counts_B - 1, 0)[:, None]
    return ids_BT, at_BJ

"""A decoder's weights for the Triton kernels: products are torch's, what lies between them is one kernel each.

Products with weights of few bits are ours, too; those stay apart.
A pass over their KV is a function over the buffers of a `GraphInputs`. A narrow one runs at the shape of its bucket, on
a CUDA device as a graph that was captured once. A wide one is prefill: torch's fused attention, row by row, at the
shape that it has. Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.backends.cuda.graphs import GraphInputs, Graphs, PassInputs, Replay, bucket, shape_of
from triforce.backends.cuda.kv import TritonKV
from triforce.backends.cuda.packed_weight import PackedWeight, on_device
from triforce.backends.cuda.splits import SHARED
from triforce.backends.cuda.triton.pointwise import norm, swiglu
from triforce.backends.cuda.triton.weight_tiles import rows_of, times
from triforce.backends.kernel_api import PAGE, ForwardBatch, ForwardOutput, KVBackend, ModelBackend, PageTable
from triforce.backends.torch.kv import WIDE
from triforce.backends.torch.model import TorchLayer, TorchModel, forward_layers, forward_layerwise, linear
from triforce.distributed.group import ALONE, TPGroup
from triforce.model.config import ModelConfig
from triforce.model.weights import Layer, Matrix, QuantizedWeight, Weights


def product(x: Tensor, weight: Matrix | None, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, (N, M), of any kind of matrix."""
    return times(x, weight, bias) if isinstance(weight, PackedWeight) else linear(x, weight, bias)


class TritonLayer(TorchLayer):
    """A block of which q, k and v are one product, and gate and up. The layer's own matrices become parts of these."""

    norm, swiglu, linear = staticmethod(norm), staticmethod(swiglu), staticmethod(product)

    def __init__(self, config: ModelConfig, layer: Layer) -> None:
        super().__init__(config, layer)
        self._qkv = joined(layer.q_proj_QC, layer.k_proj_PC, layer.v_proj_PC)
        self._qkv_bias = joined(layer.q_bias_Q, layer.k_bias_P, layer.v_bias_P)
        self._gate_up = joined(layer.gate_proj_IC, layer.up_proj_IC)
        self._gate_up_bias = joined(layer.gate_bias_I, layer.up_bias_I)

    def qkv(self, x_NC: Tensor, ranks: TPGroup = ALONE) -> tuple[Tensor, ...]:
        if self._qkv is None:
            return super().qkv(x_NC, ranks)
        layer, (H, G), eps = self.layer, (self.config.heads, self.config.kv_heads), self.config.norm_eps
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
    """Return all rows of some matrices (M, C) or vectors (M,) as one, of which these become views, to be held once.

    None where there are none, or where they are to stay apart, as those of few bits.
    """
    given = [part for part in parts if isinstance(part, Tensor)]
    if not given or any(isinstance(part, QuantizedWeight) for part in parts):
        return None
    whole = torch.cat(given)
    for part, rows in zip(given, torch.split(whole, [len(part) for part in given]), strict=True):
        part.data = rows
    return whole


class TritonModel(TorchModel):
    """Keeps the passes that were captured, for each KV memory as long as that is there."""

    block = TritonLayer

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, on_device(weights))
        self._kept: WeakKeyDictionary[TritonKV, tuple[int, Graphs]] = WeakKeyDictionary()

    def embed(self, ids_N: Tensor) -> Tensor:
        table_VC = self.weights.embedding_VC
        if not isinstance(table_VC, PackedWeight):
            return super().embed(ids_N)
        return rows_of(table_VC, ids_N.to(table_VC.device), table_VC.dtype)

    def head_rows(self, ids_N: Tensor) -> Tensor:
        head_VC = self.weights.head_VC
        if not isinstance(head_VC, PackedWeight):
            return super().head_rows(ids_N)
        return rows_of(head_VC, ids_N.to(head_VC.device), torch.float32)

    def forward(self, ids_BT: Tensor, kv: KVBackend, batch: ForwardBatch, at_BJ: Tensor | None) -> ForwardOutput:
        return self.run(self, ids_BT, kv, batch, at_BJ)

    def run(
        self, model: ModelBackend, ids_BT: Tensor, kv: KVBackend, batch: ForwardBatch, at_BJ: Tensor | None
    ) -> ForwardOutput:
        """Do what `ModelBackend.forward` says, for a model made of this one's layers."""
        if not isinstance(kv, TritonKV):
            return forward_layerwise(model, ids_BT, kv, batch, at_BJ)
        kv.prepare(batch, ids_BT.shape[1])
        B, T = ids_BT.shape
        if at_BJ is None:
            at_BJ = torch.arange(T).expand(B, -1)
        shape = shape_of(B, T, at_BJ.shape[1], batch, padded=T <= WIDE)
        if T > WIDE or batch.passing or batch.states:
            inputs = GraphInputs(shape, kv.device)
            inputs.fill(ids_BT, at_BJ, batch)
            wide = T > WIDE and not (batch.return_mass or batch.views[0][1].window)
            output = run_pass(model, kv, inputs, batch.lists() if wide else None, batch.states)
            return output if T > WIDE else _cut(output, B, T, at_BJ.shape[1], batch)
        graphs = self.graphs(kv)
        captured: Replay[GraphInputs, ForwardOutput] = graphs.get(shape, lambda: Replay(GraphInputs(shape, kv.device)))
        captured.inputs.fill(ids_BT, at_BJ, batch)
        run = partial(run_pass, model, kv, captured.inputs)
        output = graphs.run(captured, run) if kv.capturable else run()
        return _cut(output, B, T, at_BJ.shape[1], batch)

    def graphs(self, kv: TritonKV) -> Graphs:
        """The passes over this KV that were captured since something in it has moved."""
        version, graphs = self._kept.get(kv, (-1, None))
        if graphs is None or version != kv.version:
            graphs = Graphs(kv.device)
            self._kept[kv] = kv.version, graphs
        return graphs


def run_pass(
    model: ModelBackend,
    kv: TritonKV,
    inputs: PassInputs,
    wide: list[PageTable] | None = None,
    states: tuple[int, ...] = (),
) -> ForwardOutput:
    """A function of what lies in the inputs; `wide`: each layer's lists, for torch's fused attention.

    states: as in `ForwardBatch`, of passes that are not captured.
    """
    attention, shape = kv.device_attention(inputs, wide), inputs.shape
    return forward_layers(model, inputs.ids_BT, inputs.at_BJ, attention, shape.observe, shape.return_mass, states)


def _cut(whole: ForwardOutput, rows: int, width: int, columns: int, batch: ForwardBatch) -> ForwardOutput:
    """An output without the padding of its bucket, and to be kept: the next pass of this shape overwrites it."""
    logits_BJV, queries_LBTHD, mass_LBGU, states_SBTC, touched = whole
    return ForwardOutput(
        logits_BJV[:rows, :columns].clone(),
        queries_LBTHD[:, :rows, :width].clone() if queries_LBTHD is not None else None,
        mass_LBGU[:, :rows, :, : batch.views[0][1].units.shape[-1]].clone() if mass_LBGU is not None else None,
        states_SBTC[:, :rows, :width].clone() if states_SBTC is not None else None,
        touched,
    )


def workspace(config: ModelConfig, itemsize: int, rows: int, width: int, pages: int, unit: int = PAGE) -> int:
    """Return its bytes in a pass that observes the mass: of so many rows, tokens a row, and pages of the longest row.

    All are padded as passes are. Each query has float32 sums, a peak and a total of each split, and a log-sum-exp of
    each unit, so many tokens of a page. What a pass tells is the mass of each layer's units and its queries, of which
    there are two copies while those of the layers become one, and logits. itemsize: bytes of a query's number.
    """
    rows, width, pages = bucket(rows), bucket(width), bucket(pages, 64)
    splits, units = -(-pages * PAGE // SHARED), pages * PAGE // unit
    sums = 4 * rows * width * config.heads * (splits * (config.head_dim + 2) + units + 1)
    queries = itemsize * width * config.heads * config.head_dim
    told = 2 * config.layers * rows * (4 * config.kv_heads * units + queries)
    return sums + told + 4 * rows * width * config.vocab_size

"""KV memory for the Triton kernels, laid out as on the torch path: a head's pages lie behind one another.

A pass is a function over the buffers of a `GraphInputs`. A narrow one runs at the shape of its bucket, on a CUDA device
as a graph that was captured once. A wide one is prefill: torch's fused attention, row by row, at the shape that it has.
Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triforce.backends.cuda.graph_inputs import GraphInputs, ViewShape, shape_of
from triforce.backends.cuda.graphs import Graphs, Replay
from triforce.backends.cuda.triton.attention import SPLIT, SPLIT_BY_HEAD, DevicePageTable, attend
from triforce.backends.cuda.triton.page_copy import KeysValues
from triforce.backends.cuda.triton.rope_and_write import rotate_and_write
from triforce.backends.kernel_api import ForwardBatch, ForwardOutput, ModelBackend, PageTable, Rotation
from triforce.backends.layerwise import layer_by_layer
from triforce.backends.torch.kv import WIDE, TorchKV, attend_lists
from triforce.model.config import ModelConfig

NARROW = 64
"""Wider passes are not captured: there are few of them, and of many widths."""

AHEAD = 4096
"""Positions beyond the model's that the tables have at first: guesses may reach there."""


@dataclass(eq=False)
class Captured(Replay):
    """A pass through one model, and the buffers that it reads."""

    model: ModelBackend
    frame: GraphInputs


class TritonKV(TorchKV):
    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layers: int | None = None,
    ) -> None:
        super().__init__(config, pages, dtype, device, layers)
        self.device = self.keys_LGSD.device
        self._graphs = Graphs(self.device)
        self._tables_PF = self._rotations(config.context + AHEAD)

    def forward(self, model: ModelBackend, ids_BT: Tensor, at_BJ: Tensor | None, this: ForwardBatch) -> ForwardOutput:
        (B, T), window = ids_BT.shape, this.views[0][1].window
        if max(this.positions) + T > len(self._tables_PF[0]):
            self._tables_PF = self._rotations(2 * (max(this.positions) + T))
            self._graphs.clear()
        if at_BJ is None:
            at_BJ = torch.arange(T).expand(B, -1)
        wide = T > WIDE and not (this.weigh or window)
        shape = shape_of(B, T, at_BJ.shape[1], this, padded=T <= NARROW)
        if T > NARROW or this.passing:
            frame = GraphInputs(shape, self.device)
            frame.fill(ids_BT, at_BJ, this)
            outcome = self._pass(model, frame, this.lists() if wide else None)
            return outcome if T > NARROW else _cut(outcome, B, T, at_BJ.shape[1], this)
        captured = self._graphs.get((id(model), shape), lambda: Captured(model, GraphInputs(shape, self.device)))
        assert isinstance(captured, Captured)
        captured.frame.fill(ids_BT, at_BJ, this)
        outcome = self._run(captured)
        return _cut(outcome, B, T, at_BJ.shape[1], this)

    def attend(
        self, layer: int, q_BTHD: Tensor, lists: PageTable, weigh: bool = False, q_sinks_BTHD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        starts_B, counts_B = (torch.tensor(each, device=self.device) for each in (lists.starts, lists.counts))
        seen = DevicePageTable(lists.units, starts_B, counts_B, lists.unit, lists.sinks, lists.window)
        return attend(q_BTHD, *self.run(layer, 0, self.keys_LGSD.shape[2]), seen, weigh, q_sinks_BTHD)

    def _run(self, captured: Captured) -> ForwardOutput:
        return self._graphs.run(captured, lambda: self._pass(captured.model, captured.frame))

    def _pass(self, model: ModelBackend, frame: GraphInputs, wide: list[PageTable] | None = None) -> ForwardOutput:
        """A function of what lies in the frame; `wide`: each layer's lists, where torch's fused attention is wanted."""
        lists_L, shape = self._lists(frame), frame.shape
        queries: list[Tensor] = []
        masses: list[Tensor] = []

        def layer(index: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
            (units, starts_B, view), kv = lists_L[index], self._open(index)
            seen = DevicePageTable(units, starts_B, frame.counts_B, view.unit, view.sinks, view.window)
            whole, by_head = wide[index] if wide else None, len(view.units) > 2
            q_BTHD, mixed_BTHD, mass_BGU = mix(
                (q_BTHD, k_BTGD, v_BTGD), frame.positions_B, self._tables_PF, seen, kv, whole, shape.weigh, by_head
            )
            queries.append(q_BTHD)
            masses.append(mass_BGU)
            self._close(index, seen, mass_BGU)
            return mixed_BTHD

        logits_BJV = layer_by_layer(model, frame.ids_BT, frame.at_BJ, layer)
        queries_LBTHD = torch.stack(queries) if shape.observe else None
        return ForwardOutput(logits_BJV, queries_LBTHD, torch.stack(masses) if shape.weigh else None)

    def _lists(self, frame: GraphInputs) -> list[tuple[Tensor, Tensor, ViewShape]]:
        """Of each layer: its units, where `_open` will have them; starts, and settings."""
        return frame.lists()

    def _open(self, layer: int) -> KeysValues:
        """Where a layer's keys and values are in this pass, (G, S, D) each."""
        return self.keys_LGSD[layer], self.values_LGSD[layer]

    def _close(self, layer: int, seen: DevicePageTable, mass_BGU: Tensor) -> None:
        """The pass is done with a layer's keys and values."""

    def _rotations(self, length: int) -> Rotation:
        cos_PF, sin_PF = self.config.rope.cos_sin(torch.arange(length, device=self.device))
        return cos_PF, sin_PF


def mix(
    qkv: tuple[Tensor, Tensor, Tensor],
    positions_B: Tensor,
    tables_PF: Rotation,
    seen: DevicePageTable,
    kv: KeysValues,
    wide: PageTable | None = None,
    weigh: bool = False,
    by_head: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a layer makes of new tokens, which are remembered: rotated queries, mixed values, and mass as `attend`.

    `wide`: what is seen, if by torch's fused attention. `by_head`: lists are split as those of KV heads' own.
    """
    q_BTHD, q_sinks_BTHD = rotate_and_write(*qkv, positions_B, tables_PF, seen, kv)
    if wide:
        return q_BTHD, *attend_lists(q_BTHD, *kv, wide)
    return q_BTHD, *attend(q_BTHD, *kv, seen, weigh, q_sinks_BTHD, SPLIT_BY_HEAD if by_head else SPLIT)


def _cut(whole: ForwardOutput, rows: int, width: int, columns: int, this: ForwardBatch) -> ForwardOutput:
    """An outcome without the padding of its bucket, and to be kept: the next pass of this shape overwrites it."""
    logits_BJV, queries_LBTHD, mass_LBGU = whole
    return ForwardOutput(
        logits_BJV[:rows, :columns].clone(),
        queries_LBTHD[:, :rows, :width].clone() if queries_LBTHD is not None else None,
        mass_LBGU[:, :rows, :, : this.views[0][1].units.shape[-1]].clone() if mass_LBGU is not None else None,
    )

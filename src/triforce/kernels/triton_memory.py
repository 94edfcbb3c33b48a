"""KV memory for the Triton kernels, laid out as on the torch path: a head's pages lie behind one another.

A pass is a function over the buffers of a `Frame`. A narrow one runs at the shape of its bucket, on a CUDA device as a
graph that was captured once. A wide one is prefill: torch's fused attention, row by row, at the shape that it has.
Shape suffixes as in contract.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triforce.config import ModelConfig
from triforce.kernels.contract import Lists, Model, Outcome, Pass, Rotation
from triforce.kernels.frame import Frame, shape_of
from triforce.kernels.graphs import Graphs, Replay
from triforce.kernels.layers import layer_by_layer
from triforce.kernels.plain_memory import WIDE, PlainMemory
from triforce.kernels.triton.attention import Seen, attend
from triforce.kernels.triton.rotate import rotate_and_write

NARROW = 64
"""Wider passes are not captured: there are few of them, and of many widths."""

AHEAD = 4096
"""Positions beyond the model's that the tables have at first: guesses may reach there."""


@dataclass(eq=False)
class Captured(Replay):
    """A pass through one model, and the buffers that it reads."""

    model: Model
    frame: Frame


class TritonMemory(PlainMemory):
    def __init__(self, config: ModelConfig, pages: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__(config, pages, dtype, device)
        self.device = self.keys_LGSD.device
        self._graphs = Graphs(self.device)
        self._tables_PF = self._rotations(config.context + AHEAD)

    def forward(self, model: Model, ids_BT: Tensor, at_BJ: Tensor | None, this: Pass) -> Outcome:
        (B, T), window = ids_BT.shape, this.views[0][1].window
        if max(this.positions) + T > len(self._tables_PF[0]):
            self._tables_PF = self._rotations(2 * (max(this.positions) + T))
            self._graphs.clear()
        if at_BJ is None:
            at_BJ = torch.arange(T).expand(B, -1)
        wide = T > WIDE and not (this.weigh or window)
        shape = shape_of(B, T, at_BJ.shape[1], this, padded=T <= NARROW)
        if T > NARROW:
            frame = Frame(shape, self.device)
            frame.fill(ids_BT, at_BJ, this)
            return self._pass(model, frame, this.lists() if wide else None)
        captured = self._graphs.get((id(model), shape), lambda: Captured(model, Frame(shape, self.device)))
        assert isinstance(captured, Captured)
        captured.frame.fill(ids_BT, at_BJ, this)
        outcome = self._graphs.run(captured, lambda: self._pass(model, captured.frame))
        return _cut(outcome, B, T, at_BJ.shape[1], this)

    def attend(
        self, layer: int, q_BTHD: Tensor, lists: Lists, weigh: bool = False, q_sinks_BTHD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        starts_B, counts_B = (torch.tensor(each, device=self.device) for each in (lists.starts, lists.counts))
        seen = Seen(lists.units, starts_B, counts_B, lists.unit, lists.sinks, lists.window)
        return attend(q_BTHD, self.keys_LGSD[layer], self.values_LGSD[layer], seen, weigh, q_sinks_BTHD)

    def _pass(self, model: Model, frame: Frame, wide: list[Lists] | None = None) -> Outcome:
        """A function of what lies in the frame; `wide`: each layer's lists, where torch's fused attention is wanted."""
        lists_L, shape = frame.lists(), frame.shape
        queries: list[Tensor] = []
        masses: list[Tensor] = []

        def layer(index: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
            (units, starts_B, view), kv = lists_L[index], (self.keys_LGSD[index], self.values_LGSD[index])
            seen = Seen(units, starts_B, frame.counts_B, view.unit, view.sinks, view.window)
            q_BTHD, q_sinks_BTHD = rotate_and_write(
                q_BTHD, k_BTGD, v_BTGD, frame.positions_B, self._tables_PF, seen, kv
            )
            queries.append(q_BTHD)
            if wide:
                return PlainMemory.attend(self, index, q_BTHD, wide[index])[0]
            mixed_BTHD, mass_BGU = attend(q_BTHD, *kv, seen, shape.weigh, q_sinks_BTHD)
            masses.append(mass_BGU)
            return mixed_BTHD

        logits_BJV = layer_by_layer(model, frame.ids_BT, frame.at_BJ, layer)
        queries_LBTHD = torch.stack(queries) if shape.observe else None
        return Outcome(logits_BJV, queries_LBTHD, torch.stack(masses) if shape.weigh else None)

    def _rotations(self, length: int) -> Rotation:
        cos_PF, sin_PF = self.config.rope.cos_sin(torch.arange(length, device=self.device))
        return cos_PF, sin_PF


def _cut(whole: Outcome, rows: int, width: int, columns: int, this: Pass) -> Outcome:
    """An outcome without the padding of its bucket, and to be kept: the next pass of this shape overwrites it."""
    logits_BJV, queries_LBTHD, mass_LBGU = whole
    return Outcome(
        logits_BJV[:rows, :columns].clone(),
        queries_LBTHD[:, :rows, :width].clone() if queries_LBTHD is not None else None,
        mass_LBGU[:, :rows, :, : this.views[0][1].units.shape[-1]].clone() if mass_LBGU is not None else None,
    )

"""Weights of GGUF files under the names of Hugging Face's models: in their own types, or as numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from triforce.checkpoint import mxfp4
from triforce.checkpoint.gguf_file import GGUFFile
from triforce.checkpoint.gguf_names import BLOCK, ROUTER, hugging_face_names, row_order
from triforce.checkpoint.hf_config import HFConfig
from triforce.errors import ModelError
from triforce.model.weights import PLAIN, Matrix, QuantizedWeight


class GGUFWeights:
    """The tensors of a file. packed: in their own types, for kernels that read them so; else few bits are float32."""

    def __init__(self, file: GGUFFile, hf: HFConfig, *, packed: bool) -> None:
        """Raises ModelError for a tensor that models of this architecture do not have."""
        self._file, self._hf, self.packed = file, hf, packed
        self._places: dict[str, tuple[str, int | None]] = {}
        for gguf, name in hugging_face_names(file, hf.model_type, hf.extra(BLOCK)).items():
            if "{}" in name:
                self._places |= {name.format(n): (gguf, n) for n in range(self._experts(gguf))}
            else:
                self._places[name] = gguf, None

    def names(self) -> Iterable[str]:
        return self._places

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        gguf, expert = self._places[name]
        return self._file.tensors[gguf].shape[0 if expert is None else 1 :]

    def view(self, name: str) -> Matrix:
        """Return a tensor in its shape, its rows in the order of Hugging Face; a view of the file where they lie so."""
        (gguf, expert), hf = self._places[name], self._hf
        tensor = self._file.tensors[gguf]
        shape = self.shape(name)
        order = row_order(hf.model_type, gguf, hf.num_attention_heads, hf.num_key_value_heads, hf.head_dim)
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # nobody writes to it
            rows = torch.from_numpy(self._file.raw(gguf))
        if expert is not None:
            rows = rows.view(tensor.shape[0], -1, rows.shape[1])[expert]
        matrix, dtype = len(shape) == 2, PLAIN.get(tensor.type)
        packed = self.packed and matrix and not gguf.endswith(ROUTER)  # which is computed in float32, as vectors are
        if not packed and (dtype is not None or not matrix):
            plain = self._numbers(tensor.type, rows) if dtype is None else rows.flatten().view(dtype)
            numbers = plain.view(shape) if order is None else plain.view(shape)[order]
            return numbers.float() if self.packed and dtype == torch.float16 else numbers
        rows = rows if order is None else rows[order]
        if packed and tensor.type == "MXFP4":
            return of_mxfp4(rows)
        if packed:
            return QuantizedWeight(tensor.type, rows, shape[-1], partial(self._file.release, gguf))
        return self._numbers(tensor.type, rows)

    glance = view

    def _experts(self, gguf: str) -> int:
        """Return the number of experts in a tensor. Raises ModelError where the config says another, or no layer."""
        shape, experts = self._file.tensors[gguf].shape, self._hf.architecture.experts
        count, layer = experts.count if experts else 0, int(gguf.split(".")[1])
        if layer >= self._hf.num_hidden_layers:
            raise ModelError(
                f"{self._file.path}: tensor {gguf} is of layer {layer}, but the config has "
                f"{self._hf.num_hidden_layers}; download it again"
            )
        if shape[0] != count:
            raise ModelError(f"tensor {gguf} has shape {list(shape)}, but the config asks for {count} experts")
        return count

    def _numbers(self, kind: str, rows: Tensor) -> Tensor:
        from gguf import GGMLQuantizationType, quants  # 0.1 s, which only GGUF models pay for

        with np.errstate(all="ignore"):  # scales that are not finite are refused by who reads the numbers
            return torch.from_numpy(quants.dequantize(rows.numpy(), GGMLQuantizationType[kind]))


def of_mxfp4(rows: Tensor) -> Matrix:
    """Return a matrix of rows (O, 17 B), uint8: blocks of a scale and 16 bytes, whose lower nibbles come first."""
    blocks = rows.view(len(rows), -1, 17)
    scales_OB, nibbles_OB16 = blocks[..., 0], blocks[..., 1:]
    return mxfp4.weight(torch.cat((nibbles_OB16 & 15, nibbles_OB16 >> 4), -1), scales_OB, narrow=True)

"""Pages of int8 KV in the layout of the Triton kernels: the codes of 16 slots, and then their scales.

The codes of a row are thus aligned to 16 bytes, and a page is copied as one piece. Outside of the kernels a row is R
bytes, its codes followed by their scale, as in `kv_rows`. Shape suffixes as in kernel_api.py; P pages, N slots, X slots
or bytes of a page, E bytes of a scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triforce.backends.kernel_api import PAGE, KeysValues
from triforce.backends.torch.int8_rows import numbers
from triforce.model.config import SCALE_BYTES


def is_coded(memory_GSR: Tensor) -> bool:
    """Return whether a memory has pages of codes; other memories have rows of numbers."""
    return memory_GSR.dtype == torch.int8


def scales_of(memory_GSR: Tensor) -> Tensor:
    """Return a view (G, S, R / 2) of the memory as bfloat16, the type of its scales."""
    return memory_GSR.view(torch.bfloat16)


def read_rows(memory_GSR: Tensor, slots_N: Tensor) -> Tensor:
    """Return copies (G, N, R) of the rows of slots."""
    if not is_coded(memory_GSR):
        return memory_GSR.index_select(1, slots_N)
    pages_N = slots_N // PAGE
    at_N = slots_N % PAGE
    return torch.cat([part[:, pages_N, at_N] for part in _parts(memory_GSR)], -1)


def write_rows(memory_GSR: Tensor, slots_N: Tensor, rows_GNR: Tensor) -> None:
    """Store rows, of the same type and on the same device."""
    if not is_coded(memory_GSR):
        memory_GSR.index_copy_(1, slots_N, rows_GNR)
        return
    codes_GPXD, scales_GPXE = _parts(memory_GSR)
    at = slice(None), slots_N // PAGE, slots_N % PAGE
    codes_GPXD[at] = rows_GNR[..., :-SCALE_BYTES]
    scales_GPXE[at] = rows_GNR[..., -SCALE_BYTES:]


def as_numbers(kv: KeysValues, slots_N: Tensor, dtype: torch.dtype) -> KeysValues:
    """Return the numbers that the rows of slots encode, rounded to `dtype`: (G, N, D) each."""
    keys_GND, values_GND = (numbers(read_rows(memory_GSR, slots_N)).to(dtype) for memory_GSR in kv)
    return keys_GND, values_GND


def _parts(memory_GSR: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the codes (G, P, 16, D), and of the bytes of their scales (G, P, 16, 2)."""
    G, S, R = memory_GSR.shape
    codes_size = PAGE * (memory_GSR.shape[2] - SCALE_BYTES)
    pages_GPX = memory_GSR.view(G, S // PAGE, PAGE * R)
    codes_GPXD, scales_GPXE = (
        torch.unflatten(part, 2, (PAGE, -1)) for part in (pages_GPX[..., :codes_size], pages_GPX[..., codes_size:])
    )
    return codes_GPXD, scales_GPXE

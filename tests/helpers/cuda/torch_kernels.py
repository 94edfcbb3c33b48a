"""Torch in place of the Triton kernels of attention and page copies: faster than interpreted Triton."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from triforce.backends.cuda.model import TritonLayer
from triforce.backends.cuda.triton.attention import DevicePageTable
from triforce.backends.kernel_api import KeysValues, PageTable
from triforce.backends.kv_memory import slots
from triforce.backends.torch.kv import attend_tables
from triforce.backends.torch.rotation import rotate


def carried(source: KeysValues, from_X: Tensor, target: KeysValues, to_X: Tensor, size: int) -> None:
    """Copy pages one by one as `copy_pages` does; both memories must hold the named pages."""
    for a, b in zip(source, target, strict=True):
        from_pages, to_pages = (x.as_strided((_rest(x) // size, size), (size, 1)) for x in (a, b))
        to_pages[to_X[to_X > 0]] = from_pages[from_X[to_X > 0]]


def _rest(x: Tensor) -> int:
    return x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()


def mixed(
    qkv: tuple[Tensor, ...],
    positions_B: Tensor,
    tables_PF: tuple[Tensor, Tensor],
    table: DevicePageTable,
    kv: KeysValues,
    together: int,
    wide: object = None,
    return_mass: bool = False,
    by_head: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write and attend as `write_and_attend` does, on the torch path."""
    assert together == 1
    q_BTHD, k_BTGD, v_BTGD = qkv
    T = q_BTHD.shape[1]
    starts = table.starts_B.tolist()
    counts = table.counts_B.tolist()
    lists = PageTable(table.units, starts, counts)
    slots_N = slots(lists, T)
    at_N = (positions_B[:, None] + torch.arange(T)).flatten()
    rotation = tables_PF[0][at_N], tables_PF[1][at_N]
    q_BTHD, k_BTGD = (rotate(x.flatten(0, 1), rotation).view(x.shape) for x in (q_BTHD, k_BTGD))
    real_N = slots_N > 0
    for memory_GSD, new_BTGD in zip(kv, (k_BTGD, v_BTGD), strict=True):
        memory_GSD[:, slots_N[real_N]] = new_BTGD.flatten(0, 1)[real_N].transpose(0, 1)
    return q_BTHD, *attend_tables(q_BTHD, kv, lists, return_mass)


def replace_kernels(patch: pytest.MonkeyPatch) -> None:
    import triforce.backends.cuda.kv as memory
    import triforce.backends.cuda.offload.frames as places
    import triforce.backends.cuda.offload.kv as offloaded
    import triforce.backends.torch.model as plain_model

    patch.setattr(places, "copy_pages", carried)
    patch.setattr(offloaded, "PROMPT_CHUNK", 64)
    for module in (memory, offloaded):
        patch.setattr(module, "write_and_attend", mixed)
    for name in ("norm", "swiglu"):
        patch.setattr(TritonLayer, name, staticmethod(getattr(plain_model, name)))
    patch.setattr("triforce.backends.cuda.triton.topk.MAX_CANDIDATES", -1)  # so torch selects
    patch.setattr("triforce.backends.dispatch.native", None)
    patch.setattr("triforce.backends.dispatch.requested", "triton")
    patch.setenv("TRITON_INTERPRET", "1")  # or a CPU is refused, where a GPU is beside it

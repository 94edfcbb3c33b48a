"""Attention in ways that are not the engine's: int8 KV in tiles of few registers, prompts by other fused kernels.

In Triton's interpreter the tiles run on a CPU, too, where their times say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import attention as torchs
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.on_gpu import kernels
from benchmarks.on_gpu.piece import Piece, Row, Setup, left_out
from triforce.backends.cuda.splits import SHARED_UNITS
from triforce.backends.cuda.triton import attention
from triforce.backends.cuda.triton.attention import Tile, tile_of
from triforce.bench import shapes

REGISTERS = 128
"""Of a thread at most: four programs of four warps, or eight of two, share a multiprocessor."""
FOUR_WARPS, TWO_WARPS = (Tile(16, 64, 4, 3), Tile(16, 32, 4, 3)), Tile(16, 32, 2, 3)
EIGHT_WARPS = Tile(32, 64, 8, 3), Tile(32, 32, 8, 3)
TILES = {
    1: (*FOUR_WARPS, TWO_WARPS),
    8: (*EIGHT_WARPS, FOUR_WARPS[0], TWO_WARPS),
    16: (*EIGHT_WARPS, Tile(64, 32, 8, 3), FOUR_WARPS[0]),
}
"""By the width of the pass. On sm_90 they spill nothing with so few registers, as ptxas says, but for two of width 1,
which spill 24 and 48 bytes. Our own would spill 324, and 252 at larger widths."""
IMPLEMENTATIONS = ("FA3", "FA4")


@dataclass
class LimitedKernel:
    """A kernel compiled with at most `registers` registers a thread; None: without a limit."""

    kernel: Any
    registers: int | None
    compiled: list[Any] = field(default_factory=list)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*launch_args: Any, **options: Any) -> None:
            limit = {} if self.registers is None else {"maxnreg": self.registers}
            self.compiled.append(self.kernel[grid](*launch_args, **options, **limit))

        return launch


def int8_tiles(setup: Setup, shape: str, context: int) -> Iterator[Piece]:
    """Attention over int8 KV: by our own tile, and by those of few registers."""
    s = shapes.SHAPES[shape]
    setup = replace(setup, kv_int8=True)
    for width, smaller in TILES.items():
        own_tile = tile_of(setup.dtype.itemsize, s.head_dim, width * s.heads // s.kv_heads, coded=True)
        for tile, registers in ((own_tile, None), *((tile, REGISTERS) for tile in smaller)):
            limit = f"at most {registers} registers" if registers else "our own"
            tiled = f"{tile.rows} x {tile.keys}, {tile.warps} warps, {tile.stages} stages"
            run = partial(_limited, setup, shape, context, width, tile, registers)
            yield Piece(f"attention over int8 KV, width {width}, {tiled}, {limit}", shape, context, run)


def _limited(setup: Setup, shape: str, context: int, width: int, tile: Tile, registers: int | None) -> Row:
    kernel = LimitedKernel(attention._splits, registers)
    with mock.patch.object(attention, "_splits", kernel):
        row = kernels.attend_once(setup, shape, context, width, tile, SHARED_UNITS)
    last_kernel = kernel.compiled[-1]
    return row | {"registers": getattr(last_kernel, "n_regs", None), "spilled": getattr(last_kernel, "n_spills", None)}


def prefill(setup: Setup, shape: str, context: int) -> Iterator[Piece]:
    """A layer's attention over a prompt, causal: by torch's flash attention, by FA3 and FA4, by cuDNN."""
    yield Piece("prefill's attention, torch's flash", shape, context, partial(_causal, setup, shape, context, _flash))
    for name in IMPLEMENTATIONS:
        yield Piece(f"prefill's attention, {name}", shape, context, partial(_by, name, setup, shape, context))
    yield Piece("prefill's attention, cuDNN's", shape, context, partial(_by_cudnn, setup, shape, context))


def _by(name: str, setup: Setup, shape: str, context: int) -> Row:
    """Measure an implementation that torch knows and that is installed; afterwards torch has its own again."""
    kernel_names = getattr(torchs, "list_flash_attention_impls", list[str])()
    if name not in kernel_names:
        return left_out(f"torch {torch.__version__} does not know {name}")
    try:
        torchs.activate_flash_attention_impl(name)
    except (ImportError, RuntimeError) as error:
        return left_out(f"{name}: {error}")
    try:
        return _causal(setup, shape, context, _flash)
    finally:
        torchs.restore_flash_attention_impl()


def _by_cudnn(setup: Setup, shape: str, context: int) -> Row:
    if not setup.on_gpu:
        return left_out("cuDNN is of a GPU")
    with torchs.sdpa_kernel(torchs.SDPBackend.CUDNN_ATTENTION):
        return _causal(setup, shape, context, lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True))


def _flash(q_1HTD: Tensor, k_1HTD: Tensor, v_1HTD: Tensor) -> object:
    if q_1HTD.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_1HTD, k_1HTD, v_1HTD, is_causal=True)
    return torch.ops.aten._scaled_dot_product_flash_attention(q_1HTD, k_1HTD, v_1HTD, is_causal=True)


def _causal(setup: Setup, shape: str, context: int, attend: Callable[[Tensor, Tensor, Tensor], object]) -> Row:
    """Seconds of a layer; `fraction_of_limit`: of the rate of matrix products, of half of all pairs."""
    s = shapes.SHAPES[shape]
    q, k, v = (torch.randn(1, s.heads, context, s.head_dim, dtype=setup.dtype, device=setup.device) for _ in "qkv")
    took = setup.clock.device_seconds(lambda: attend(q, k, v), 5 if setup.on_gpu else 1)
    operations = 2 * s.heads * s.head_dim * context**2
    limit = operations / setup.clock.matrix_rate / took
    return {"seconds": took, "operations": operations, "fraction_of_limit": limit, "speedup": None}

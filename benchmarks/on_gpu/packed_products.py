"""Products with packed weights: ours, torch's of 4 bits, gemlite's where that is installed, and those of numbers.

In Triton's interpreter ours run on a CPU, too, where their times say nothing. Shape suffixes: N tokens, M outputs,
K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.on_gpu.piece import Piece, Row, Setup, left_out, of_limit
from triforce.backends.cuda.packed_weight import PackedWeight, packed
from triforce.backends.cuda.triton import weight_tiles
from triforce.bench import shapes

KINDS = ("Q4_0", "Q4_K", "Q6_K")
TOKENS = (1, 8)
FOUR_BITS, GROUPS, WIDTHS = ("Q4_0", "Q4_K"), (32, 128), (1, 8, 16)
"""Our types of 4 bits, inputs that share a scale in the others', and tokens of each."""
MATRICES = 8
"""Bytes of the matrices that one product takes in turns: more than a cache holds."""

Product = Callable[[Tensor], Tensor]
Make = Callable[[Setup, int, int], tuple[Product, int]]
"""Takes a setup, outputs and inputs of a matrix; returns the product with it, and the bytes of the matrix."""


def products(setup: Setup, shape: str) -> Iterator[Piece]:
    """Products with weights of GGUF types, and with those of the clock's type."""
    for outputs, inputs in _matrices(shape):
        for kind in (*(kind for kind in KINDS if inputs % shapes.CODE_BLOCKS[kind][0] == 0), None):
            for tokens in TOKENS:
                what = f"product with {kind or 'numbers'}, {outputs} x {inputs}, {tokens} tokens"
                make = partial(_ours, kind) if kind else _numbers
                yield Piece(what, shape, tokens, partial(_product, setup, make, outputs, inputs, tokens))


def of_four_bits(setup: Setup, shape: str) -> Iterator[Piece]:
    """Products with weights of 4 bits in each way there is, beside those of numbers."""
    ways: dict[str, Make] = {f"{kind}, ours": partial(_ours, kind) for kind in FOUR_BITS}
    ways |= {f"int4 in groups of {group}, torch's": partial(_torchs, group) for group in GROUPS}
    ways |= {f"int4 in groups of {group}, gemlite's": partial(_gemlites, group) for group in GROUPS}
    for outputs, inputs in _matrices(shape):
        for what, make in {**ways, "numbers": _numbers}.items():
            for tokens in WIDTHS:
                run = partial(_product, setup, make, outputs, inputs, tokens)
                if "gemlite" in what and find_spec("gemlite") is None:
                    run = partial(left_out, "gemlite is not installed")
                yield Piece(f"product with {what}, {outputs} x {inputs}, {tokens} tokens", shape, tokens, run)


def _matrices(shape: str) -> tuple[tuple[int, int], ...]:
    """Outputs and inputs of a layer's larger matrices."""
    s = shapes.SHAPES[shape]
    return (s.hidden, s.hidden), (s.intermediate, s.hidden), (s.hidden, s.intermediate)


def _product(setup: Setup, make: Make, outputs: int, inputs: int, tokens: int) -> Row:
    """Seconds of one product, of several matrices in turns."""
    count, repeats = (MATRICES, 10) if setup.on_gpu else (1, 1)
    x_NK = torch.randn(tokens, inputs, device=setup.device).to(setup.dtype)
    layers = [make(setup, outputs, inputs) for _ in range(count)]
    took = setup.clock.device_seconds(lambda: [times(x_NK) for times, _ in layers], repeats) / count
    return of_limit(setup, took, layers[0][1])


def _ours(kind: str, setup: Setup, outputs: int, inputs: int) -> tuple[Product, int]:
    weight = packed(shapes.random_codes(kind, outputs, inputs), setup.device)
    assert isinstance(weight, PackedWeight), "kernels know its type"
    planes = weight.blocks, weight.scales, weight.minima, weight.small_scales
    size = sum(plane.nbytes for plane in {plane.data_ptr(): plane for plane in planes}.values())
    return lambda x_NK: weight_tiles.times(x_NK, weight), size


def _numbers(setup: Setup, outputs: int, inputs: int) -> tuple[Product, int]:
    dense_MK = torch.randn(outputs, inputs, device=setup.device).to(setup.dtype)
    return lambda x_NK: torch.nn.functional.linear(x_NK, dense_MK), dense_MK.nbytes


def _torchs(group: int, setup: Setup, outputs: int, inputs: int) -> tuple[Product, int]:
    """A scale and a zero of each group, in the clock's type."""
    settings = torch.rand(inputs // group, outputs, 2, device=setup.device).to(setup.dtype)
    if setup.on_gpu:
        pairs = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8, device=setup.device)
        weight = torch._convert_weight_to_int4pack(pairs, 8)
        times = torch._weight_int4pack_mm
    else:
        codes_MK = torch.randint(16, (outputs, inputs), dtype=torch.int32)
        weight = torch._convert_weight_to_int4pack_for_cpu(codes_MK, 1)
        times = torch._weight_int4pack_mm_for_cpu
    return lambda x_NK: times(x_NK, weight, group, settings), outputs * inputs // 2 + settings.nbytes


def _gemlites(group: int, setup: Setup, outputs: int, inputs: int) -> tuple[Product, int]:
    """A scale and a zero of each group; it tunes itself when it is first called, which is not counted."""
    from gemlite.helper import A16W4_HQQ_INT

    codes_MK = torch.randint(16, (outputs, inputs), dtype=torch.uint8, device=setup.device)
    scales, zeros = (torch.rand(outputs, inputs // group, device=setup.device).to(setup.dtype) for _ in range(2))
    packed_layer: Any = A16W4_HQQ_INT(device=str(setup.device), dtype=setup.dtype)
    return packed_layer.from_weights(codes_MK, scales, zeros), outputs * inputs // 2 + 2 * scales.nbytes

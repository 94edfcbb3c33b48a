"""Types of GGUF tensors: numbers, names and sizes of their blocks, and the float32 numbers of readable blocks.

A row of a tensor is a sequence of blocks, and a block holds consecutive weights of its row. The types and the layouts
are those of ggml's block types (`ggml.h` and `ggml-common.h` of llama.cpp); `LAYOUTS` gives each block byte by byte.

Shape suffixes: M rows, K weights of a row, N blocks, W weights of a block, S scales of a block, X bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from triforce.arrays import HOST_TYPES, float32
from triforce.model.weights import NUMBER_TYPES

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.float32]
Blocks = NDArray[np.void]
"""Blocks (N,), with the fields of their type's layout."""


class BlockType(NamedTuple):
    """A type of tensors."""

    name: str
    weights: int
    """Weights of a block."""
    size: int
    """Bytes of a block."""


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    9: BlockType("Q8_1", 32, 40),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18),
}
"""Types by their number in a file, with the sizes of the `gguf` package."""
_SCALE = ("scale", "<f2")
_MINIMUM = ("minimum", "<f2")
_FIELDS: dict[str, list[Any]] = {
    "Q4_0": [_SCALE, ("nibbles", "u1", 16)],
    "Q4_1": [_SCALE, _MINIMUM, ("nibbles", "u1", 16)],
    "Q5_0": [_SCALE, ("fifth_bits", "u1", 4), ("nibbles", "u1", 16)],
    "Q5_1": [_SCALE, _MINIMUM, ("fifth_bits", "u1", 4), ("nibbles", "u1", 16)],
    "Q8_0": [_SCALE, ("codes", "i1", 32)],
    "Q4_K": [_SCALE, _MINIMUM, ("factors", "u1", (3, 4)), ("nibbles", "u1", (4, 32))],
    "Q5_K": [_SCALE, _MINIMUM, ("factors", "u1", (3, 4)), ("fifth_bits", "u1", 32), ("nibbles", "u1", (4, 32))],
    "Q6_K": [("nibbles", "u1", (2, 64)), ("upper_bits", "u1", (2, 32)), ("factors", "i1", 16), _SCALE],
    "MXFP4": [("exponent", "u1"), ("nibbles", "u1", 16)],
}
LAYOUTS = {kind: np.dtype(fields) for kind, fields in _FIELDS.items()}
"""Fields of a block, in the order of its bytes. A weight is its code times a scale, plus a minimum if there is one.

- `nibbles` are the lower four bits of codes. Of X bytes the lower nibbles belong to X weights, and the upper nibbles to
  the next X. Q4_K and Q5_K have 32 bytes for each 64 weights, Q6_K 64 bytes for each 128.
- `fifth_bits` of Q5_0 and Q5_1 have the bit of weight i at position i of a little-endian integer. In Q5_K, byte i has
  the bits of the weights i, 32 + i, 64 + i and so on, the lowest bit first.
- `upper_bits` are the fifth and the sixth bit of codes, 32 bytes for each 128 weights: byte i has those of the weights
  i, 32 + i, 64 + i and 96 + i, the lowest bits first.
- `factors` of Q6_K are integers, one for each 16 weights, whose scale is this integer times `scale`. Those of Q4_K and
  Q5_K are integers of six bits, two for each 32 weights: one times `scale` is the scale, and the other one times
  `minimum` is subtracted. `_factors` says which bits they are.
- `exponent` e gives the scale 2^(e - 128), and the code of a weight is an index of `E2M1_DOUBLES`.
- Codes of Q4_0, Q5_0 and Q6_K are unsigned; 8, 16 and 32 stand for 0.
"""
E2M1_DOUBLES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each E2M1 code, the number format of MXFP4."""
CHUNK = 1 << 18
"""Weights that are unpacked at a time: their numbers and the codes fit into a core's cache."""


def block_type(number: int) -> BlockType:
    """Return the type of a number in a file. An unknown one has the number as its name, and blocks of one byte."""
    return BLOCK_TYPES.get(number) or BlockType(f"number {number}", 1, 1)


def unpacked_rows(kind: str, rows_MX: Bytes) -> Numbers:
    """Return the numbers of packed rows, float32 (M, K): a view of the rows' memory if their type is F32.

    kind: F32, F16, BF16, or a key of `LAYOUTS`. rows_MX: whole blocks. Scales that are not finite give infinities and
    NaN. Memory is taken for the numbers, and for `CHUNK` codes.
    """
    if kind in NUMBER_TYPES:
        return float32(rows_MX.view(HOST_TYPES[NUMBER_TYPES[kind]]))
    layout = LAYOUTS[kind]
    blocks = rows_MX.reshape(-1).view(layout)
    W = _WEIGHTS[kind]
    numbers_NW = np.empty((len(blocks), W), np.float32)
    step = CHUNK // W
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(blocks), step):
            chunk = slice(start, start + step)
            _write_numbers(numbers_NW[chunk], _DECODERS[kind](blocks[chunk]))
    return numbers_NW.reshape(len(rows_MX), rows_MX.shape[1] // layout.itemsize * W)


def bit_fields(bytes_X: Bytes, width: int) -> Bytes:
    """Return fields of `width` bits, uint8 (..., 8 / width * X), from bytes (..., X).

    The lowest fields of all bytes come first, then those above them.
    """
    shifts_F1 = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    fields_FX = bytes_X[..., None, :] >> shifts_F1
    fields_FX &= np.uint8((1 << width) - 1)
    return fields_FX.reshape(*bytes_X.shape[:-1], -1)


def mxfp4_scales(exponents: Bytes) -> Numbers:
    """Return the factors of `E2M1_DOUBLES` by the exponents of MXFP4 blocks, float32 in their shape.

    A factor is half of a block's power of two. The exponent 255, which means NaN in the format, gives 2^127.
    """
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)


class _ScaledCodes(NamedTuple):
    """Codes of blocks, and what makes numbers of them."""

    codes_NW: NDArray[Any]
    """Integers."""
    scales_NS: Numbers
    """Scales, each of W / S weights."""
    minima_NS: Numbers | None = None
    """Terms of the same weights."""


def _write_numbers(numbers_NW: Numbers, scaled: _ScaledCodes) -> None:
    """Write codes times scales plus minima. Products of finite scales are exact or infinite; a sum is rounded once."""
    numbers_NW[...] = scaled.codes_NW
    numbers_NSG = numbers_NW.reshape(*scaled.scales_NS.shape, -1)
    numbers_NSG *= scaled.scales_NS[..., None]
    if scaled.minima_NS is not None:
        numbers_NSG += scaled.minima_NS[..., None]


def _q4_0(blocks: Blocks) -> _ScaledCodes:
    return _ScaledCodes(_signed(bit_fields(blocks["nibbles"], 4), 8), _column(blocks["scale"]))


def _q4_1(blocks: Blocks) -> _ScaledCodes:
    return _ScaledCodes(bit_fields(blocks["nibbles"], 4), _column(blocks["scale"]), _column(blocks["minimum"]))


def _q5_0(blocks: Blocks) -> _ScaledCodes:
    return _ScaledCodes(_signed(_five_bits(blocks), 16), _column(blocks["scale"]))


def _q5_1(blocks: Blocks) -> _ScaledCodes:
    return _ScaledCodes(_five_bits(blocks), _column(blocks["scale"]), _column(blocks["minimum"]))


def _q8_0(blocks: Blocks) -> _ScaledCodes:
    return _ScaledCodes(blocks["codes"], _column(blocks["scale"]))


def _q4_k(blocks: Blocks) -> _ScaledCodes:
    codes_NW = bit_fields(blocks["nibbles"], 4).reshape(-1, 256)
    return _ScaledCodes(codes_NW, *_factors(blocks))


def _q5_k(blocks: Blocks) -> _ScaledCodes:
    codes_NW = bit_fields(blocks["nibbles"], 4).reshape(-1, 256)
    codes_NW |= bit_fields(blocks["fifth_bits"], 1) << 4
    return _ScaledCodes(codes_NW, *_factors(blocks))


def _q6_k(blocks: Blocks) -> _ScaledCodes:
    codes_N2H = bit_fields(blocks["nibbles"], 4)
    codes_N2H |= bit_fields(blocks["upper_bits"], 2) << 4
    scales_NS = _column(blocks["scale"]) * blocks["factors"]
    return _ScaledCodes(_signed(codes_N2H.reshape(-1, 256), 32), scales_NS)


def _mxfp4(blocks: Blocks) -> _ScaledCodes:
    doubles_NW = np.array(E2M1_DOUBLES, np.int8)[bit_fields(blocks["nibbles"], 4)]
    return _ScaledCodes(doubles_NW, mxfp4_scales(blocks["exponent"])[:, None])


def _column(halves_N: NDArray[np.float16]) -> Numbers:
    """Return one number of each block, float32 (N, 1)."""
    return halves_N.astype(np.float32)[:, None]


def _signed(codes_NW: Bytes, centre: int) -> NDArray[np.int8]:
    """Return codes minus the one that stands for 0, int8."""
    return codes_NW.view(np.int8) - np.int8(centre)


def _five_bits(blocks: Blocks) -> Bytes:
    """Return the codes of Q5_0 or Q5_1 blocks, uint8 (N, 32)."""
    codes_NW = bit_fields(blocks["nibbles"], 4)
    codes_NW |= np.unpackbits(blocks["fifth_bits"], axis=-1, bitorder="little") << 4
    return codes_NW


def _factors(blocks: Blocks) -> tuple[Numbers, Numbers]:
    """Return the scales and the minima of Q4_K or Q5_K blocks, float32 (N, 8) each; minima are negative terms.

    The twelve bytes of factors are three groups of four. The lower six bits of the first group are the scales 0 to 3,
    and those of the second group the minima 0 to 3. In the third group lower nibbles belong to the scales 4 to 7, and
    upper nibbles to the minima; the upper two bits of the first group complete these scales, and those of the second
    group these minima.
    """
    groups_N34 = blocks["factors"]
    nibbles_N24 = bit_fields(groups_N34[:, 2], 4).reshape(-1, 2, 4)
    upper_N24 = nibbles_N24 | groups_N34[:, :2] >> 6 << 4
    factors_N2S = np.concatenate((groups_N34[:, :2] & 63, upper_N24), -1)
    scales_NS = _column(blocks["scale"]) * factors_N2S[:, 0]
    minima_NS = _column(blocks["minimum"]) * factors_N2S[:, 1]
    return scales_NS, -minima_NS


_DECODERS: dict[str, Callable[[Blocks], _ScaledCodes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
_WEIGHTS = {kind.name: kind.weights for kind in BLOCK_TYPES.values()}

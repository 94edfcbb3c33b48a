"""Kernels have the same bits at the levels that docs/data/level_bits.toml states, and at no others.

Shape suffixes as in paged.py; N rows or tokens, K inputs, M outputs.
"""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.gguf_blocks import KINDS, Blocks, random_blocks
from tests.helpers.paged_kv import Paged, at_level, native, slots
from tests.helpers.random_tensors import normal
from tests.helpers.sampler_scenes import COUPLINGS, scene, verdict
from tests.helpers.samplers import native_sampling

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
torch.set_num_threads(1)

DATA = Path(__file__).parents[3] / "docs" / "data" / "level_bits.toml"
STATED = tomllib.loads(DATA.read_text(encoding="utf-8"))["kernels"]
UNFUSED = {"portable"} if platform.machine() in ("x86_64", "AMD64") else set()
Results = Iterator[Tensor]


def product(weight: Blocks | Tensor, x_NK: Tensor, bits: int = 0) -> Tensor:
    y_NM = torch.empty(len(x_NK), len(weight if isinstance(weight, Tensor) else weight.blocks))
    native.Matrix(weight, bits=bits).linear(x_NK, y_NM)
    return y_NM


def inputs(dtype: torch.dtype) -> Tensor:
    return normal(7, 768, seed=1).to(dtype)


def products(dtype: torch.dtype) -> Results:
    yield product(normal(100, 768).to(dtype), inputs(dtype))


def products_with(*kinds: str) -> Callable[[torch.dtype], Results]:
    def multiply(dtype: torch.dtype) -> Results:
        for kind in kinds:
            yield product(random_blocks(kind, 40, 768, dtype == torch.bfloat16), inputs(dtype))

    return multiply


def products_with_copies(dtype: torch.dtype) -> Results:
    for bits in (8, 4):
        yield product(normal(100, 768).to(dtype), inputs(dtype), bits)


def attention(dtype: torch.dtype, int8: bool = False) -> Results:
    S, T = 1400, 4
    for D, gain in ((64, 1.0), (96, 5.0)):
        kv = Paged(2, D, 100, dtype, int8=int8)
        row, q_BTHD = kv.row(S), kv.normal(1, T, 6, D, gain=gain)
        attn_out, mass = torch.empty_like(q_BTHD), torch.empty(1, 2, len(row.list_P))
        kv.pages.attend(q_BTHD, [S - T], [T], row.list_P[None], attn_out, mass, coarse=[S - T] if int8 else [])
        yield from (attn_out, mass)


def attention_to_copies(dtype: torch.dtype) -> Results:
    yield from attention(dtype, int8=True)


def attention_to_codes(dtype: torch.dtype) -> Results:
    S, T = 1400, 4
    for D, gain in ((64, 1.0), (96, 5.0), (256, 1.0)):
        kv = Paged(2, D, 100, dtype, codes=True)
        row, q_BTHD, q_sinks_BTHD = kv.row(S), *(kv.normal(1, T, 6, D, gain=gain) for _ in range(2))
        for options in ({}, {"q_sinks": q_sinks_BTHD, "sinks": 16, "window": 500}):
            attn_out, mass = torch.empty_like(q_BTHD), torch.empty(1, 2, len(row.list_P))
            kv.pages.attend(q_BTHD, [S - T], [T], row.list_P[None], attn_out, mass, **options)
            yield from (attn_out, mass)
    q, k, v = normal(3, 20, 128, seed=3).unbind()
    angles, rotated = normal(100, 32), torch.empty(20, 2, 64, dtype=dtype)
    kv = Paged(2, 64, 9, dtype, codes=True)
    kv.pages.rope_and_write(q, k, v, angles.cos(), angles.sin(), torch.arange(20), slots(kv.take(20), 20), rotated)
    yield kv.memory


def between_products(dtype: torch.dtype) -> Results:
    """The matrices are the unit matrix, or of a type with exact sums."""
    y_NC = torch.empty(5, 768)
    eye = native.Matrix(torch.eye(768).to(dtype))
    native.LmHead(normal(768, seed=2).to(dtype), eye, eps=1e-5).logits(normal(5, 768), y_NC)
    weight = random_blocks("Q8_0", 64, 96, dtype == torch.bfloat16, size=0.1)
    mlp = native.GatedMlp(torch.ones(96), weight, weight, eps=1e-5)
    gated_NI = torch.empty(5, mlp.stride, dtype=dtype)
    mlp.forward(normal(5, 96), gated_NI)
    kv = Paged(2, 64, 9, dtype)
    N = 20
    q, k, v = normal(3, N, 128).unbind()
    angles = normal(100, 32)
    rotated = torch.empty(N, 2, 64, dtype=dtype)
    place_N = slots(kv.take(120), 120)[:N]
    kv.pages.rope_and_write(q, k, v, angles.cos(), angles.sin(), torch.arange(N), place_N, rotated)
    yield from (y_NC, gated_NI, rotated, kv.keys.nan_to_num(9), kv.values.nan_to_num(9))


def draws(dtype: torch.dtype) -> Results:
    """Logits are float32 for every type."""
    for seed, coupling in enumerate(COUPLINGS):
        batch_scene = scene(seed, 700, rows=6)
        verification = verdict(batch_scene, native_sampling, coupling)
        yield torch.from_numpy(verification.counts_B[batch_scene.live_B])
        for b in batch_scene.live_B.nonzero()[0].tolist():
            count = int(verification.counts_B[b])
            yield from (verification.probs_BKV[b, :count], torch.from_numpy(verification.tokens_BK[b, :count]))


RUNS: list[Callable[[torch.dtype], Results]] = [
    products, products_with("F16"), products_with("F32"), products_with(*KINDS), products_with_copies,
    attention, attention_to_copies, attention_to_codes, between_products, draws,
]  # fmt: skip


class Kernel(NamedTuple):
    run: Callable[[torch.dtype], Results]
    dtype: torch.dtype
    same_at: str


KERNELS = {
    f"{kernel['name']}, {dtype}": Kernel(run, getattr(torch, dtype), kernel[dtype])
    for kernel, run in zip(STATED, RUNS, strict=True)
    for dtype in ("bfloat16", "float32")
}


def at_levels(run: Callable[[], Results]) -> dict[str, list[Tensor]]:
    tensors_by_level = {}
    for level in native.levels():
        with at_level(level):
            tensors_by_level[level] = list(run())
    return tensors_by_level


@pytest.mark.parametrize("name", KERNELS)
def test_levels_agree_as_stated(name: str) -> None:
    """All levels have the bits of the best one, but for levels without fused multiply-adds where that is stated."""
    run, dtype, same_at = KERNELS[name]
    tensors_by_level = at_levels(lambda: run(dtype))
    *lower_levels, best = native.levels()
    equal_levels = {
        level for level in lower_levels if all(map(torch.equal, tensors_by_level[level], tensors_by_level[best]))
    }
    assert equal_levels == {*lower_levels} - (UNFUSED if same_at == "fused" else set())


def test_subnormal_products_are_zero_with_avx512bf16_alone() -> None:
    weight_MK, x_NK = (normal(9, 768, seed=seed).bfloat16() * 1e-20 for seed in (0, 1))
    tensors_by_level = at_levels(lambda: iter([product(weight_MK, x_NK)]))
    for level, (y_NM,) in tensors_by_level.items():
        assert bool(y_NM.any()) == (level != "avx512bf16")
        assert level in {"avx512bf16", *UNFUSED} or torch.equal(y_NM, tensors_by_level["avx2"][0])


def test_subnormal_sums_of_quantised_products_agree() -> None:
    """A scale and a float have no digits beyond those of a double there, so an emulating level rounds once."""
    x_NK = normal(9, 768) * 2e-34
    tensors_by_level = at_levels(
        lambda: iter([product(random_blocks(kind, 40, 768, size=1e-7), x_NK) for kind in KINDS])
    )
    best = tensors_by_level[native.levels()[-1]]
    subnormal = torch.stack([(y_NM != 0) & (y_NM.abs() < 2.0**-126) for y_NM in best])
    assert 0.2 < subnormal.float().mean() < 0.8
    assert all(all(map(torch.equal, tensors, best)) for tensors in tensors_by_level.values())


def at_input(dequantized: np.float32) -> float:
    """Return the input of a group of its own whose code and scale give `dequantized`."""
    code_limit = np.float32(32767)
    candidates = dequantized * (1 + np.arange(-8, 9) * 2.0**-24).astype(np.float32)
    return float(next(x for x in candidates if code_limit * (x / code_limit) == dequantized))


def test_sums_just_above_halfway_are_rounded_up(level: str) -> None:
    """1 + 2^-24 + 2^-54, for example: a double would lose the last term, and then round to the even float, 1."""
    halfway_sums = 0
    for m in range(1025, 2048):
        wide = -(-(2**34) // m)
        if not 0 < m * wide - 2**34 < 2**5:
            continue
        scale = np.float16(m * 2.0**-22)
        factor = np.float32(wide * 2.0**-36)
        assert np.float32(1 + float(scale) * float(factor)) == 1
        blocks = np.zeros((1, 2, 34), np.uint8)  # of Q8_0: a half, and 32 codes, the first one 1
        blocks[0, :, :2] = np.array([[1], [scale]], np.float16).view(np.uint8)
        blocks[0, :, 2] = 1
        x_NK = torch.zeros(1, 64)
        x_NK[0, 0] = at_input(np.float32(1))
        x_NK[0, 32] = at_input(factor)
        y_NM = product(Blocks("Q8_0", torch.from_numpy(blocks.reshape(1, -1))), x_NK)
        assert y_NM.item() == 1 + 2.0**-23
        halfway_sums += 1
    assert halfway_sums > 5

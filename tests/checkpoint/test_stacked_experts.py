"""Experts of gpt-oss in one tensor: MXFP4 as transformers reads it, and as the codes that native kernels multiply with.

Shape suffixes as in checkpoint/stacked_experts.py; E experts, I inputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.helpers.family_models import LENGTH, family_model, paged_logits, texts
from tests.helpers.tiny_checkpoint import edit, save
from triforce.arrays import float32, to_host
from triforce.backends import dispatch
from triforce.checkpoint.gguf.weights import mxfp4_matrix
from triforce.checkpoint.stacked_experts import Bytes, mxfp4_numbers, q5_0, unstack_experts
from triforce.checkpoint.weight_files import open_archives
from triforce.engine.model_loader import load
from triforce.errors import ModelError
from triforce.model.weights import QuantizedWeight

SIZES = dict(hidden_size=64, intermediate_size=96)


def random_mxfp4(*shape: int, seed: int = 0) -> tuple[Bytes, Bytes]:
    """Blocks uint8 (*shape, B, 16) of all codes, and scales uint8 (*shape, B) around 1/16; of inputs 32 B."""
    draw, (*outer, inputs) = np.random.default_rng(seed), shape
    blocks = draw.integers(0, 256, (*outer, inputs // 32, 16), np.uint8)
    return blocks, draw.integers(119, 125, (*outer, inputs // 32), np.uint8)


def codes(blocks_OB16: Bytes) -> Bytes:
    """As the names of nibbles: the lower ones first."""
    return np.stack((blocks_OB16 & 15, blocks_OB16 >> 4), -1).reshape(*blocks_OB16.shape[:-1], 32)


def by_transformers(blocks: Bytes, scales: Bytes, dtype: torch.dtype) -> Tensor:
    """Return the numbers (E, inputs, outputs)."""
    return convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=dtype).contiguous()


def test_mxfp4_numbers_equal_transformers() -> None:
    blocks_EOB16, scales_EOB = random_mxfp4(3, 40, 96)
    theirs_EIO = to_host(by_transformers(blocks_EOB16, scales_EOB, torch.bfloat16))
    for expert in range(3):
        found_OI = mxfp4_numbers(codes(blocks_EOB16[expert]), scales_EOB[expert])
        assert found_OI.dtype == np.uint16 and np.array_equal(float32(found_OI), float32(theirs_EIO[expert].T))


def test_mxfp4_numbers_of_all_scales_are_those_of_transformers() -> None:
    """Of infinite, subnormal and missing numbers, too."""
    blocks_1OB16, _ = random_mxfp4(1, 256, 64)
    scales_1OB = np.repeat(np.arange(256, dtype=np.uint8), 2).reshape(1, 256, 2)
    found_OI = float32(mxfp4_numbers(codes(blocks_1OB16[0]), scales_1OB[0]))
    theirs_OI = by_transformers(blocks_1OB16, scales_1OB, torch.float32)[0].T.numpy()
    assert np.array_equal(found_OI[:255], theirs_OI[:255]) and np.isnan(found_OI[255]).all()
    assert np.isinf(found_OI[254]).any() and (np.abs(found_OI[0][found_OI[0] != 0]) < 2.0**-126).any()


@pytest.mark.skipif(dispatch.native is None, reason="without native kernels")
def test_codes_are_the_same_numbers() -> None:
    blocks_OB16, scales_OB = random_mxfp4(48, 128)
    blocks_OB16[3, 1], scales_OB[3, 1] = 0x80, 0  # zeros, of which half are negative, and the least scale
    packed = q5_0(codes(blocks_OB16), scales_OB)
    assert packed is not None
    found_OI = np.empty((48, 128), np.float32)
    dispatch.native.Embedding(QuantizedWeight("Q5_0", packed, 128)).rows(np.arange(48), found_OI)
    assert np.array_equal(found_OI, float32(mxfp4_numbers(codes(blocks_OB16), scales_OB)))


@pytest.mark.parametrize("scale", [0, 90, 150, 255])
def test_scales_that_are_no_halves_stay_numbers(scale: int) -> None:
    blocks_OB16, scales_OB = random_mxfp4(4, 64)
    scales_OB[2, 1] = scale
    assert q5_0(codes(blocks_OB16), scales_OB) is None
    assert np.isnan(float32(mxfp4_numbers(codes(blocks_OB16), scales_OB))).any() == (scale == 255)


def mxfp4_folders(folder: Path) -> tuple[Path, Path]:
    """A model whose experts are numbers that MXFP4 has, and the same one with blocks and scales in their place."""
    model = family_model("gpt-oss", **SIZES)
    blocks: dict[str, Tensor] = {}
    for i, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for part, outputs, inputs in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            name = f"model.layers.{i}.mlp.experts.{part}"
            pair = random_mxfp4(8, outputs, inputs, seed=i)
            blocks[f"{name}_blocks"], blocks[f"{name}_scales"] = map(torch.from_numpy, pair)
            getattr(experts, part).data = by_transformers(*pair, torch.float32)
    plain, packed = save(model, folder / "numbers"), save(model, folder / "mxfp4")
    tensors = load_file(packed / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if not name.endswith(("gate_up_proj", "down_proj"))}
    save_file(kept | blocks, packed / "model.safetensors")
    edit(packed / "config.json", quantization_config={"quant_method": "mxfp4"})
    return plain, packed


def logits(folder: Path, dtype: str) -> Tensor:
    decoder = load(folder, device="cpu", dtype=dtype, context=LENGTH).decoder
    return paged_logits(decoder, texts(), [[LENGTH, LENGTH]])


def test_mxfp4_folder_has_logits_of_its_numbers(tmp_path: Path) -> None:
    """In float32 just these; with codes no further from them than numbers of bfloat16 are."""
    plain, packed = mxfp4_folders(tmp_path)
    exact = logits(plain, "float32")
    assert torch.equal(logits(packed, "float32"), exact)
    errors = [(logits(folder, "bfloat16") - exact).square().mean().sqrt() for folder in (packed, plain)]
    assert errors[0] < 1.2 * errors[1]


@pytest.mark.skipif(dispatch.native is None, reason="without native kernels")
def test_mxfp4_stays_codes_in_native_kernels(tmp_path: Path) -> None:
    _, packed = mxfp4_folders(tmp_path)
    archives = unstack_experts(open_archives(packed), 4, 8, packed=True)
    weight: Any = archives["model.layers.1.mlp.experts.3.up_proj.weight"].view(
        "model.layers.1.mlp.experts.3.up_proj.weight"
    )
    assert weight.kind == "Q5_0" and weight.shape == (96, 64)


def test_mxfp4_damage_and_other_quantizations_raise(tmp_path: Path) -> None:
    _, packed = mxfp4_folders(tmp_path)
    edit(packed / "config.json", quantization_config={"quant_method": "awq"})
    with pytest.raises(ModelError, match=r"quantization_config.quant_method = 'awq' .*supported: mxfp4"):
        load(packed, device="cpu")
    edit(packed / "config.json", quantization_config={"quant_method": "mxfp4"})
    tensors = load_file(packed / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.down_proj_scales"]
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(ModelError, match=r"lack the tensor .*layers.2.mlp.experts.down_proj_scales"):
        load(packed, device="cpu")


def test_mxfp4_of_gguf_files_are_the_numbers_of_their_package() -> None:
    rows = np.random.default_rng(0).integers(0, 256, (40, 2, 17), np.uint8)
    rows[..., 0] = rows[..., 0] % 5 + 120
    rows = rows.reshape(40, -1)
    weight: Any = mxfp4_matrix(rows)
    assert weight.kind == "Q5_0"
    found = quants.dequantize(weight.blocks, GGMLQuantizationType.Q5_0)
    assert np.array_equal(found, quants.dequantize(rows, GGMLQuantizationType.MXFP4))

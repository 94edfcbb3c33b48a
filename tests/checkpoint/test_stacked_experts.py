"""Experts of gpt-oss in one tensor: MXFP4 as transformers reads it, and as codes that native kernels multiply.

Shape suffixes as in checkpoint/stacked_experts.py; E experts, I inputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.helpers.family_models import LENGTH, family_model, paged_logits, texts
from tests.helpers.tiny_checkpoint import edit, save
from triforce.backends import dispatch
from triforce.checkpoint.gguf.weights import of_mxfp4
from triforce.checkpoint.stacked_experts import mxfp4_numbers, q5_0, unstacked
from triforce.checkpoint.weight_files import open_archives
from triforce.engine.model_loader import load
from triforce.errors import ModelError
from triforce.model.weights import QuantizedWeight

SIZES = dict(hidden_size=64, intermediate_size=96)


def random_mxfp4(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return MXFP4 blocks and scales of 32 B inputs.

    Blocks are uint8 (*shape, B, 16) with all codes, scales uint8 (*shape, B) around 1/16.
    """
    draw = torch.Generator().manual_seed(seed)
    (*outer, inputs) = shape
    blocks = torch.randint(0, 256, (*outer, inputs // 32, 16), generator=draw, dtype=torch.uint8)
    return blocks, torch.randint(119, 125, (*outer, inputs // 32), generator=draw, dtype=torch.uint8)


def codes(blocks_OB16: Tensor) -> Tensor:
    """Return codes in the order of nibbles: the lower ones first."""
    return torch.stack((blocks_OB16 & 15, blocks_OB16 >> 4), -1).flatten(-2)


def test_mxfp4_numbers_equal_transformers() -> None:
    blocks_EOB16, scales_EOB = random_mxfp4(3, 40, 96)
    theirs_EIO = convert_moe_packed_tensors(blocks_EOB16, scales_EOB, dtype=torch.bfloat16)
    for expert in range(3):
        found_OI = mxfp4_numbers(codes(blocks_EOB16[expert]), scales_EOB[expert])
        assert torch.equal(found_OI, theirs_EIO[expert].T)


@pytest.mark.skipif(dispatch.native is None, reason="without native kernels")
def test_codes_are_the_same_numbers() -> None:
    blocks_OB16, scales_OB = random_mxfp4(48, 128)
    # zeros, half of them negative, and the least scale
    blocks_OB16[3, 1] = 0x80
    scales_OB[3, 1] = 0
    packed = q5_0(codes(blocks_OB16), scales_OB)
    assert packed is not None
    found_OI = torch.empty(48, 128)
    dispatch.native.Embedding(QuantizedWeight("Q5_0", packed, 128)).rows(torch.arange(48), found_OI)
    assert torch.equal(found_OI, mxfp4_numbers(codes(blocks_OB16), scales_OB).float())


@pytest.mark.parametrize("scale", [0, 90, 150, 255])
def test_scales_that_are_no_halves_stay_numbers(scale: int) -> None:
    blocks_OB16, scales_OB = random_mxfp4(4, 64)
    scales_OB[2, 1] = scale
    assert q5_0(codes(blocks_OB16), scales_OB) is None
    assert mxfp4_numbers(codes(blocks_OB16), scales_OB).isnan().any() == (scale == 255)


def mxfp4_folders(folder: Path) -> tuple[Path, Path]:
    """Return a folder whose experts are numbers that MXFP4 can represent, and one with blocks and scales instead."""
    model = family_model("gpt-oss", **SIZES)
    blocks: dict[str, Tensor] = {}
    for i, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for part, outputs, inputs in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            name = f"model.layers.{i}.mlp.experts.{part}"
            pair = random_mxfp4(8, outputs, inputs, seed=i)
            blocks[f"{name}_blocks"], blocks[f"{name}_scales"] = pair
            getattr(experts, part).data = convert_moe_packed_tensors(*pair, dtype=torch.float32).contiguous()
    plain = save(model, folder / "numbers")
    packed = save(model, folder / "mxfp4")
    tensors = load_file(packed / "model.safetensors")
    dense_tensors = {
        name: tensor for name, tensor in tensors.items() if not name.endswith(("gate_up_proj", "down_proj"))
    }
    save_file(dense_tensors | blocks, packed / "model.safetensors")
    edit(packed / "config.json", quantization_config={"quant_method": "mxfp4"})
    return plain, packed


def logits(folder: Path, dtype: str) -> Tensor:
    decoder = load(folder, device="cpu", dtype=dtype, context=LENGTH).decoder
    return paged_logits(decoder, texts(), [[LENGTH, LENGTH]])


def test_mxfp4_folder_has_logits_of_its_numbers(tmp_path: Path) -> None:
    """In float32 the logits are equal. With codes the error is at most that of bfloat16 numbers."""
    plain, packed = mxfp4_folders(tmp_path)
    exact = logits(plain, "float32")
    assert torch.equal(logits(packed, "float32"), exact)
    errors = [(logits(folder, "bfloat16") - exact).square().mean().sqrt() for folder in (packed, plain)]
    assert errors[0] < 1.2 * errors[1]


@pytest.mark.skipif(dispatch.native is None, reason="without native kernels")
def test_mxfp4_stays_codes_in_native_kernels(tmp_path: Path) -> None:
    _, packed = mxfp4_folders(tmp_path)
    archives = unstacked(open_archives(packed), 4, 8, narrow=True)
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
    rows = torch.randint(0, 256, (40, 2, 17), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    rows[..., 0] = rows[..., 0] % 5 + 120
    reference = torch.from_numpy(quants.dequantize(rows.flatten(1).numpy(), GGMLQuantizationType.MXFP4))
    weight: Any = of_mxfp4(rows.flatten(1))
    assert weight.kind == "Q5_0"
    block_numbers = torch.from_numpy(quants.dequantize(weight.blocks.numpy(), GGMLQuantizationType.Q5_0))
    assert torch.equal(block_numbers, reference)

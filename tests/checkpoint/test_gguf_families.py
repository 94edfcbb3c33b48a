"""GGUF files of families beyond Llama and Qwen, with names of the format's own package: logits are those of folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.helpers.family_models import LENGTH, SIZES, family_model, paged_logits, texts
from tests.helpers.gguf_families import CHANGES, FILES, all_tensors, metadata, tensors
from tests.helpers.gguf_files import write_gguf
from tests.helpers.gguf_models import numbers_of, packed
from tests.helpers.tiny_checkpoint import save
from tests.helpers.tiny_llm import ask, ids
from triforce.backends import dispatch
from triforce.checkpoint.gguf.config import PATTERN, read_gguf_config
from triforce.checkpoint.gguf.file import GGUFFile
from triforce.checkpoint.model_files import open_model
from triforce.engine.model_loader import load
from triforce.errors import ModelError
from triforce.llm import LLM

LEFT_OUT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "all layers of Gemma see all": (
        "gemma-3", "attention.sliding_window", {"layer_types": ["full_attention"] * 6, "num_hidden_layers": 6},
    ),
    "one of four layers of OLMo sees all": (
        "olmo-3", PATTERN, {"layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    ),
    "scores of Granite are scaled as usual": (
        "granite-3", "attention.scale", {"attention_multiplier": SIZES["head_dim"] ** -0.5},
    ),
}  # fmt: skip
"""A family, a key that its file may lack, and the config that the missing key means."""
BLOCKS: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "qwen3-moe": ({"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"}, dict(hidden_size=256, moe_intermediate_size=256)),
    "gpt-oss": (dict.fromkeys(("gate", "up", "down"), "MXFP4"), {}),
}
"""Types of experts in published files, and sizes of whole blocks."""


@pytest.mark.parametrize("name", FILES)
def test_gguf_family_logits_equal_folder(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, *FILES[name], CHANGES.get(name, {}))


@pytest.mark.parametrize("name", LEFT_OUT)
def test_gguf_without_a_key_means_what_llama_cpp_takes(tmp_path: Path, name: str) -> None:
    family, key, changes = LEFT_OUT[name]
    arch, fields_by_key = FILES[family]
    remaining_fields = {gguf_key: field for gguf_key, field in fields_by_key.items() if gguf_key != key}
    check(tmp_path, family, arch, remaining_fields, CHANGES.get(family, {}) | changes)


@pytest.mark.parametrize("name", ["llama-biases", "granite-3"])
@pytest.mark.parametrize("lacking", ["o", "qkv"])
def test_gguf_may_have_some_biases_of_attention(tmp_path: Path, name: str, lacking: str) -> None:
    """Either q, k and v have biases, or the output of attention. A folder has zeros for the missing ones."""
    model = family_model(name, vocab_size=300, attention_bias=True)
    arch, fields_by_key = FILES[name]
    for layer in model.model.layers:
        for part in lacking:
            torch.nn.init.zeros_(getattr(layer.self_attn, f"{part}_proj").bias)
    folder = save(model, tmp_path / "hf")
    missing_names = [f"attn_{part}.bias".replace("_o.", "_output.") for part in lacking]
    all_weights = tensors(folder, arch, model.config.num_hidden_layers)
    remaining_weights = {key: weight for key, weight in all_weights.items() if not key.endswith(tuple(missing_names))}
    assert len(all_weights) - len(remaining_weights) == len(missing_names) * model.config.num_hidden_layers
    file = write_gguf(tmp_path / "model.gguf", metadata(model.config, arch, fields_by_key), remaining_weights)
    gguf_logits, expected = (
        paged_logits(load(path, device="cpu", dtype="float32", context=LENGTH).decoder, texts(), [[LENGTH, LENGTH]])
        for path in (file, folder)
    )
    torch.testing.assert_close(gguf_logits, expected[..., : gguf_logits.shape[2]], atol=2e-5, rtol=0)
    parts = read_gguf_config(GGUFFile(file)).architecture
    assert (parts.qkv_bias, parts.o_bias) == (lacking == "o", lacking == "qkv")


def test_gguf_of_granite_without_rotations_is_refused(tmp_path: Path) -> None:
    values = metadata(family_model("granite-3", vocab_size=300).config, *FILES["granite-3"])
    values |= {"granite.rope.scaling.finetuned": False}
    ends = {name: np.zeros((300, 64), np.float32) for name in ("token_embd.weight", "output.weight")}
    with pytest.raises(ModelError, match=r"rope\.scaling\.finetuned = False"):
        read_gguf_config(GGUFFile(write_gguf(tmp_path / "x.gguf", values, ends)))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("expert_gating_func", 1, "expert_gating_func = 1"), ("nextn_predict_layers", 5, "nextn_predict_layers = 5")],
)
def test_gguf_of_another_router_is_refused(tmp_path: Path, key: str, value: int, message: str) -> None:
    values = metadata(family_model("glm-4.5", vocab_size=300).config, *FILES["glm-4.5"]) | {f"glm4moe.{key}": value}
    ends = {name: np.zeros((300, 64), np.float32) for name in ("token_embd.weight", "output.weight")}
    with pytest.raises(ModelError, match=message):
        read_gguf_config(GGUFFile(write_gguf(tmp_path / "x.gguf", values, ends)))


def test_gguf_router_of_few_bits_is_read_as_numbers(tmp_path: Path) -> None:
    """The router is computed in float32, for every type in the file."""
    model = family_model("qwen3-moe", vocab_size=300)
    arch, fields_by_key = FILES["qwen3-moe"]
    weights = tensors(save(model, tmp_path / "hf"), arch, model.config.num_hidden_layers)
    routers = [name for name in weights if "ffn_gate_inp" in name]
    weights |= {name: (gguf.GGMLQuantizationType.Q8_0, weights[name]) for name in routers}
    file = write_gguf(tmp_path / "model.gguf", metadata(model.config, arch, fields_by_key), weights)
    archives = open_model(file).archives(packed=True)
    router_weights = {name: archives[name].view(name) for name in archives if name.endswith("mlp.gate.weight")}
    assert len(routers) == len(router_weights) == model.config.num_hidden_layers
    for name, router in router_weights.items():
        assert isinstance(router, np.ndarray) and router.dtype == np.float32
        np.testing.assert_allclose(router, model.state_dict()[name].numpy(), atol=2e-2, rtol=0)


@pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")
@pytest.mark.parametrize("name", BLOCKS)
def test_gguf_experts_in_blocks_are_their_numbers(tmp_path: Path, name: str) -> None:
    """Kernels read each expert's blocks where they lie in the stack."""
    kinds, sizes = BLOCKS[name]
    model = family_model(name, vocab_size=300, **sizes)
    arch, fields_by_key = FILES[name]
    weights = tensors(save(model, tmp_path / "hf"), arch, model.config.num_hidden_layers)
    stacks = [stack for stack in weights if stack.endswith("_exps.weight")]
    assert len(stacks) == 3 * model.config.num_hidden_layers
    blocks = dict(weights)
    numbers = dict(weights)
    for seed, stack in enumerate(stacks):
        kind = kinds[stack.split("_")[1]]
        packed_experts = [packed(expert, kind, 10 * seed + n) for n, expert in enumerate(weights[stack])]
        blocks[stack] = packed_experts[0][0], np.stack([expert_blocks for _, expert_blocks in packed_experts])
        numbers[stack] = numbers_of(*blocks[stack])
    values = metadata(model.config, arch, fields_by_key)
    file, plain = (write_gguf(tmp_path / f"{n}.gguf", values, stored) for n, stored in enumerate((blocks, numbers)))
    block_logits, exact, bfloat16_logits = (
        paged_logits(load(path, device="cpu", dtype=dtype, context=LENGTH).decoder, texts(), [[LENGTH, LENGTH]])
        for path, dtype in ((file, "float32"), (plain, "float32"), (file, "bfloat16"))
    )
    assert torch.equal(block_logits, exact) and 0 < (bfloat16_logits - exact).abs().mean() < 0.06 * exact.std()
    llm = LLM(file, retrieval_budget=64, searched_layers="none")
    prompts = [ids(length) for length in (150, 215)]
    plain_ids, retrieval_ids = (
        [output.outputs[0].token_ids for output in llm.generate(prompts, ask(), mode=mode)]
        for mode in ("ar", "retrieval")
    )
    assert plain_ids == retrieval_ids


@pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")
@pytest.mark.parametrize(
    ("inner", "kind", "message"),
    [
        (128, "Q6_K", "is Q6_K, in blocks of 256 inputs, .* shared experts in it has 128; .* such as Q8_0 or Q4_0, or"),
        (48, "Q8_0", "is Q8_0, in blocks of 32 inputs, .* shared experts in it has 48; .* such as BF16, or a folder"),
    ],
)
def test_gguf_shared_experts_within_block_are_refused(tmp_path: Path, inner: int, kind: str, message: str) -> None:
    """Two shared experts lie in one MLP: blocks fit its inner size, but not the half of each expert."""
    model = family_model("glm-4.5", vocab_size=300, moe_intermediate_size=inner)
    arch, fields_by_key = FILES["glm-4.5"]
    weights = tensors(save(model, tmp_path / "hf"), arch, model.config.num_hidden_layers)
    down = [name for name in weights if "ffn_down_shexp" in name]
    weights |= {name: packed(weights[name], kind, 0) for name in down}
    file = write_gguf(tmp_path / "model.gguf", metadata(model.config, arch, fields_by_key), weights)
    with pytest.raises(ModelError, match=f"down_proj.weight {message}"):
        load(file, device="cpu", dtype="bfloat16", context=LENGTH)
    load(file, device="cpu", dtype="float32", context=LENGTH)


def check(tmp_path: Path, name: str, arch: str, fields_by_key: dict[str, str], changes: dict[str, Any]) -> None:
    """Check that a file has the logits of a folder. fields_by_key: keys of the file, by the fields of a config."""
    model = family_model(name, vocab_size=300, **changes)
    folder = save(model, tmp_path / "hf")
    all_weights = all_tensors(model, folder, arch)
    weights = sum(weight.nbytes for weight in all_weights.values())
    if "nextn_predict_layers" in fields_by_key:
        all_weights |= {
            name: np.ones((300, 64), np.float32) for name in ("blk.4.nextn.eh_proj.weight", "blk.4.attn_q.weight")
        }
    file = write_gguf(tmp_path / "model.gguf", metadata(model.config, arch, fields_by_key), all_weights)
    assert open_model(file).weight_bytes == weights, "of layers that are computed"
    gguf_logits, expected = (
        paged_logits(load(path, device="cpu", dtype="float32", context=LENGTH).decoder, texts(), [[LENGTH, LENGTH]])
        for path in (file, folder)
    )
    expected = expected[..., : gguf_logits.shape[2]]  # the file says which tokens are unused
    # The numbers of a file are float32, and so are its factors.
    torch.testing.assert_close(gguf_logits, expected, atol=2e-5, rtol=0)
    packed = load(file, device="cpu", dtype="bfloat16", context=LENGTH).decoder
    packed_logits = paged_logits(packed, texts(), [[LENGTH, LENGTH]])
    assert (packed_logits - expected).abs().mean() < 0.06 * expected.std()

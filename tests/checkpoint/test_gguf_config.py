"""Metadata of GGUF files as configs: those of transformers come back, and unsupported arithmetic is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from scripts.smollm2 import config_of
from tests.helpers.gguf_files import HEADS, LLAMA, SMOLLM2, byte_level_values, tensors_of, write_gguf
from tests.helpers.tiny_checkpoint import save, tiny_model
from triforce.checkpoint.gguf.config import Divided, read_gguf_config
from triforce.checkpoint.gguf.file import GGUFFile
from triforce.checkpoint.gguf.weights import hugging_face_names, row_order
from triforce.checkpoint.hf_config import frequencies, read_config
from triforce.checkpoint.rope_scaling import Linear, Llama3, Unscaled, Yarn
from triforce.errors import ModelError

ENDS = {"token_embd.weight": np.zeros((300, 64), np.float32), "output.weight": np.zeros((300, 64), np.float32)}


def opened(folder: Path, tensors: dict[str, Any] | None = None, **changes: Any) -> GGUFFile:
    """Return a file with the sizes of tiny models. `__` in names of keys stands for a dot."""
    values = LLAMA | byte_level_values() | {name.replace("__", "."): value for name, value in changes.items()}
    return GGUFFile(write_gguf(folder / "x.gguf", values, ENDS if tensors is None else tensors))


def refuses(file: GGUFFile, match: str) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        read_gguf_config(file)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_model_written_as_gguf_comes_back(tmp_path: Path, family: str, tied: bool) -> None:
    sizes = {"vocab_size": 300, "tie_word_embeddings": tied} | ({"head_dim": 16} if family == "qwen3" else {})
    model = tiny_model(FAMILIES[family], **sizes)
    values = {key.replace("llama.", f"{family}."): value for key, value in LLAMA.items()} | byte_level_values()
    values["general.architecture"] = family
    file = GGUFFile(write_gguf(tmp_path / "x.gguf", values, tensors_of(model, family)))
    gguf_config = read_gguf_config(file)
    folder_config = read_config(save(model, tmp_path / "hf"))
    assert gguf_config == replace(folder_config, rope_theta=10_000.0)
    state = model.state_dict()
    names = hugging_face_names(file, family)
    assert set(names.values()) == set(state) - ({"lm_head.weight"} if tied else set())
    for ours, theirs in names.items():
        rows = file.raw(ours).view(np.float32)
        order = row_order(family, ours, **HEADS)
        assert np.array_equal(rows if order is None else rows[order], state[theirs].numpy().reshape(rows.shape))


def test_rows_are_woven_in_llama_alone() -> None:
    for name in ("blk.1.attn_k.weight", "blk.0.attn_q.bias"):
        order = row_order("llama", name, 2, 2, 8)
        assert order is not None and order.tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    for family, name in (
        ("qwen2", "blk.0.attn_q.weight"),
        ("llama", "blk.0.attn_v.weight"),
        ("llama", "output.weight"),
    ):
        assert row_order(family, name, 4, 2, 8) is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general__architecture": "mamba"}, r"general.architecture = 'mamba' .*supported: llama, qwen2"),
    "adapter": ({"general__type": "adapter"}, "general.type = 'adapter'"),
    "layers": ({"llama__block_count": ...}, "x.gguf: llama.block_count = None .*whole numbers"),
    "too many layers": ({"llama__block_count": 1 << 30}, "llama.block_count = 1073741824"),
    "text": ({"llama__embedding_length": "wide"}, "llama.embedding_length = 'wide'"),
    "eps": ({"llama__attention__layer_norm_rms_epsilon": ...}, "layer_norm_rms_epsilon = None"),
    "heads": ({"llama__attention__head_count_kv": 3}, "head_count_kv = 3 .*divisors of 4"),
    "heads of layers": (
        {"llama__attention__head_count_kv": np.array([2, 4], np.int32)},
        "head_count_kv = 'a list of 2 different values'",
    ),
    "values": ({"llama__attention__value_length": 8}, "attention.value_length = 8 .*supported: 16"),
    "odd": ({"llama__attention__key_length": 15}, "attention.key_length = 15 .*even numbers"),
    "part of a head": ({"llama__rope__dimension_count": 8}, "rope.dimension_count = 8 .*supported: 16"),
    "experts": ({"llama__expert_count": 8, "llama__expert_used_count": 9}, r"num_experts_per_tok = 9"),
    "window": ({"llama__attention__sliding_window": 64}, "llama.attention.sliding_window = 64"),
    "logits": ({"llama__logit_scale": 0.5}, "llama.logit_scale = 0.5"),
    "residuals": ({"llama__residual_scale": 0.5}, "llama.residual_scale = 0.5"),
    "embedding": ({"llama__embedding_scale": 12.0}, "llama.embedding_scale = 12.0"),
    "anything": ({"llama__hyper__drive": True}, r"llama.hyper.drive = True is not supported \(supported: none\)"),
    "base": ({"llama__rope__freq_base": 0.0}, "rope.freq_base = 0.0"),
    "rope type": ({"llama__rope__scaling__type": "longrope"}, "rope.scaling.type = 'longrope' .*none, linear, yarn"),
    "factor": ({"llama__rope__scaling__factor": 0.5}, "rope.scaling.factor = 0.5"),
    "temper": ({"llama__rope__scaling__attn_factor": 1.2}, "rope.scaling.attn_factor = 1.2"),
    "vocabulary": ({"llama__vocab_size": 301}, "llama.vocab_size = 301 .*supported: 300"),
    "tokens": ({"tokenizer__ggml__tokens": ["a"]}, r"token_embd.weight has shape \[300, 64\].* ask for \[1, 64\]"),
    "no tokens": ({"tokenizer__ggml__tokens": 3}, "tokenizer.ggml.tokens is no list of texts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_config_unsupported_is_refused_by_key(tmp_path: Path, case: str) -> None:
    changes, match = REFUSED[case]
    refuses(opened(tmp_path, **changes), match)


def test_file_without_weights_is_refused(tmp_path: Path) -> None:
    refuses(opened(tmp_path, {}), "lacks the tensor token_embd.weight")


def test_tensor_of_other_models_is_refused(tmp_path: Path) -> None:
    for name in ("blk.0.attn_norm.bias", "blk.0.attn_q_norm.weight", "blk.0.ffn_gate_exps.weight", "cls.weight"):
        file = opened(tmp_path, ENDS | {name: np.zeros(64, np.float32)})
        with pytest.raises(ModelError, match=f"tensor {name} is not part of a llama model"):
            hugging_face_names(file, "llama")


def test_numbers_for_each_layer_that_agree_are_one(tmp_path: Path) -> None:
    layer_values = {"llama__attention__head_count_kv": np.array([2, 2], np.int32)}
    assert read_gguf_config(opened(tmp_path, **layer_values)).num_key_value_heads == 2
    assert read_gguf_config(opened(tmp_path, llama__attention__head_count_kv=...)).num_key_value_heads == 4


def test_rope_scaling_equals_that_of_transformers(tmp_path: Path) -> None:
    scaled = "llama__rope__scaling__"
    assert read_gguf_config(opened(tmp_path)).scaling == Unscaled()
    assert read_gguf_config(opened(tmp_path, llama__rope__scale_linear=4.0)).scaling == Linear(4.0)
    gguf_config = read_gguf_config(opened(tmp_path, **{f"{scaled}type": "linear", f"{scaled}factor": 2.5}))
    assert gguf_config.scaling == Linear(2.5)
    assert read_gguf_config(opened(tmp_path, **{f"{scaled}type": "none", f"{scaled}factor": 2.5})).scaling == Unscaled()
    yarn = {f"{scaled}type": "yarn", f"{scaled}factor": 4.0, f"{scaled}original_context_length": 32}
    gguf_config = read_gguf_config(opened(tmp_path, **yarn, **{f"{scaled}attn_factor": 1.0}))
    assert isinstance(gguf_config.scaling, Yarn) and gguf_config.positions == 128
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}
    reference = transformers.LlamaConfig(head_dim=16, max_position_embeddings=128, rope_parameters=rope)
    check_frequencies(gguf_config, reference)


def check_frequencies(gguf_config: Any, reference: transformers.LlamaConfig) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(reference)
    ours, scale = frequencies(gguf_config, gguf_config.max_position_embeddings)
    np.testing.assert_allclose(ours, theirs.inv_freq.numpy(), rtol=1e-6)
    assert scale == pytest.approx(theirs.attention_scaling)


def test_factors_of_llama_3_are_divided_by(tmp_path: Path) -> None:
    scaling = Llama3(8.0, 64, 1.0, 4.0)
    plain, _ = Unscaled().frequencies(10_000.0, 16, 128)
    reference, _ = scaling.frequencies(10_000.0, 16, 128)
    factors = {"rope_freqs.weight": plain / reference}
    file = opened(tmp_path, ENDS | factors)
    gguf_config = read_gguf_config(file)
    assert isinstance(gguf_config.scaling, Divided) and gguf_config.positions == 128
    np.testing.assert_allclose(frequencies(gguf_config, 128)[0], reference, rtol=1e-6)
    assert "rope_freqs.weight" not in hugging_face_names(file, "llama")
    scaled = {"llama__rope__scaling__factor": 2.0}
    refuses(opened(tmp_path, ENDS | factors, **scaled), "rope.scaling.factor = 2.0 .*beside the tensor rope_freqs")
    refuses(opened(tmp_path, ENDS | {"rope_freqs.weight": np.ones(7, np.float32)}), r"rope_freqs.weight is F32 \[7\]")
    refuses(opened(tmp_path, ENDS | {"rope_freqs.weight": np.zeros(8, np.float32)}), "not positive numbers")


@pytest.mark.skipif(not SMOLLM2.exists(), reason=f"there is no {SMOLLM2.name}")
def test_real_model_has_the_config_of_the_converter(tmp_path: Path) -> None:
    file = GGUFFile(SMOLLM2)
    assert {tensor.type for tensor in file.tensors.values()} == {"F32", "Q4_1", "Q8_0"}
    gguf_config = read_gguf_config(file)
    converter_config = config_of(dict(file.metadata))
    assert {key: getattr(gguf_config, key) for key in converter_config if hasattr(gguf_config, key)} == {
        key: value for key, value in converter_config.items() if hasattr(gguf_config, key)
    }
    assert len(hugging_face_names(file, "llama")) == len(file.tensors)

"""A bad model raises a ModelError that says what is wrong and names the field, the tensor or the file."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.tiny_checkpoint import edit, save, tiny_model
from triforce.engine.model_loader import load
from triforce.errors import ModelError, RequestError, TriforceError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tiny_model(), tmp_path)


def refuses(folder: Path | str, match: str, **options: Any) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        load(folder, **({"device": "cpu"} | options))
    assert isinstance(caught.value, TriforceError) and "Traceback" not in str(caught.value)


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "family": (dict(model_type="gpt2"), r"model_type = 'gpt2' is not supported \(supported: llama, mistral"),
    "no family": (dict(model_type=...), "model_type = None"),
    "code": (dict(model_type="evil", auto_map={"AutoConfig": "evil.C"}), "model_type = 'evil'.*auto_map.*never run"),
    "mixture": (dict(num_local_experts=8), "num_local_experts = 8"),
    "activation": (dict(hidden_act="gelu"), r"hidden_act = 'gelu' is not supported \(supported: silu"),
    "attention bias": (dict(model_type="mistral", attention_bias=True), "attention_bias = True"),
    "no attention bias": (dict(attention_bias=True), r"lack the tensor model.layers.0.self_attn.*8 missing"),
    "mlp bias": (dict(model_type="mistral", mlp_bias=True), "mlp_bias = True"),
    "no choice of biases": (dict(mlp_bias="all"), r"mlp_bias = 'all' is not supported \(supported: False, True"),
    "partial rope": (dict(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
    "partial rope, new": (
        dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
        "rope_parameters.partial_rotary_factor = 0.5",
    ),
    "quantized": (dict(quantization_config=dict(quant_method="gptq", bits=4)), "quantization_config = .*gptq"),
    "rope type": (
        dict(rope_parameters=dict(rope_type="proportional", rope_theta=1e4)),
        r"rope_parameters.rope_type = 'proportional' is not supported \(supported: default, linear",
    ),
    "rope field": (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4)), "config.json.*factor"),
    "rope table": (
        dict(rope_parameters=dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 3, long_factor=[1.0] * 3,
                                  original_max_position_embeddings=32)),
        r"rope_parameters.short_factor = .* \(supported: lists of 8 numbers",
    ),
    "heads": (dict(num_key_value_heads=3), "num_key_value_heads = 3 .*divisors of 4"),
    "types": (dict(hidden_size="wide"), r"hidden_size = 'wide' is not supported \(supported: whole numbers"),
    "sizes": (dict(intermediate_size=100), "tensor model.layers.0.mlp.*has shape .*96.*asks for .*100"),
    "too few layers": (dict(num_hidden_layers=1), r"tensor model.layers.1.*not part of such a model"),
    "too many layers": (dict(num_hidden_layers=3), r"lack the tensor model.layers.2.*9 missing"),
    "no positions": (dict(max_position_embeddings=0), "max_position_embeddings = 0 .*whole numbers from 1"),
    "ties": (dict(tie_word_embeddings=True), "tie_word_embeddings = True, but lm_head.weight differs"),
}  # fmt: skip


@pytest.mark.parametrize("case", FIELDS)
def test_config_bad_field_raises_model_error(folder: Path, case: str) -> None:
    changes, match = FIELDS[case]
    edit(folder / "config.json", **changes)
    refuses(folder, match)


def test_checkpoint_code_is_never_run(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('run')")
    edit(folder / "config.json", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    load(folder, device="cpu")


def test_draft_with_windows_raises(tmp_path: Path) -> None:
    """The error is gone for contexts within the window."""
    folder = save(tiny_model("Mistral", sliding_window=64), tmp_path)
    target = load(folder, device="cpu")
    assert target.config.windows == [64, 64]
    with pytest.raises(RequestError, match="2 of 2 layers have a window of 64 tokens, and such a model cannot draft"):
        load(folder, device="cpu", target=target)
    assert load(folder, device="cpu", context=64, target=target).config.windows == [0, 0]


def test_config_qwen_windows_are_of_upper_layers(tmp_path: Path) -> None:
    window = dict(use_sliding_window=True, sliding_window=64)
    upper = load(save(tiny_model("Qwen2", **window, max_window_layers=1), tmp_path / "a"), device="cpu")
    unwindowed = load(save(tiny_model("Qwen2", **window, max_window_layers=2), tmp_path / "b"), device="cpu")
    assert (upper.config.windows, unwindowed.config.windows) == ([0, 64], [0, 0])


def test_context_beyond_model_raises(folder: Path) -> None:
    refuses(folder, "context=129 cannot be had: this model has 128 positions; use context=128 or less", context=129)


def test_device_or_dtype_unknown_raises(folder: Path) -> None:
    refuses(folder, "device='abacus' cannot be used here; use device='cpu'", device="abacus")
    refuses(folder, "dtype='int3' is not supported; use one of auto, float32", dtype="int3")
    refuses(folder, "dtype='torch.int64' is not supported", dtype=torch.int64)


def change(folder: Path, name: str, make: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed = make(tensors.pop(name))
    save_file(tensors | ({} if changed is None else {name: changed}), file)


def poison(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor.view(-1)[-1] = value
    return tensor


Q = "model.layers.1.self_attn.q_proj.weight"


def test_tensors_missing_or_misshapen_raise(folder: Path) -> None:
    change(folder, Q, lambda t: poison(t, torch.nan))
    refuses(folder, f"{folder} is damaged: tensor {Q} holds NaN or Inf; download it again")
    change(folder, Q, lambda t: poison(t, -torch.inf))
    refuses(folder, f"tensor {Q} holds NaN or Inf")
    change(folder, Q, lambda t: poison(t, 1e6))
    refuses(folder, f"{folder}: tensor {Q} has numbers beyond float16; change dtype", dtype="float16")
    change(folder, Q, lambda t: t[:-1].clone())
    refuses(folder, rf"tensor {Q} has shape \[63, 64\], but the config asks for \[64, 64\]")
    change(folder, Q, lambda t: torch.ones(64, 64, dtype=torch.int8))
    refuses(folder, f"tensor {Q} is int8")
    change(folder, "lm_head.weight", lambda t: None)
    refuses(folder, r"lack the tensor lm_head.weight \(1 missing in all\); if the embedding is the head, set tie_word")
    change(folder, Q, lambda t: None)
    refuses(folder, r"lack the tensor lm_head.weight \(2 missing")


def test_tensor_unknown_raises(folder: Path) -> None:
    change(folder, Q, lambda t: t)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"score.bias": torch.ones(3)}, folder / "model.safetensors")
    refuses(folder, "tensor score.bias is not part of such a model")


@pytest.mark.parametrize("size", [0, 5, 700, -1])
def test_safetensors_truncated_raises(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    refuses(folder, "model.safetensors is corrupt, truncated or a Git LFS pointer.*download it again")


def test_safetensors_garbage_raises(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refuses(folder, "model.safetensors is corrupt")


def as_bin(folder: Path, content: Any) -> Path:
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def test_bin_unreadable_raises(folder: Path) -> None:
    file = as_bin(folder, load_file(folder / "model.safetensors"))
    load(folder, device="cpu")
    file.write_bytes(file.read_bytes()[:-2000])
    refuses(folder, "pytorch_model.bin is corrupt")
    file.write_bytes(b"")
    refuses(folder, "pytorch_model.bin is corrupt")


class Harm:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return eval, ("__import__('sys').exit('run')",)


def test_bin_with_code_raises(folder: Path) -> None:
    as_bin(folder, {"a": Harm()})
    refuses(folder, "pytorch_model.bin holds more than tensors.*safetensors")


def test_bin_of_other_object_raises(folder: Path) -> None:
    as_bin(folder, {"model": {"deep": torch.ones(1)}})
    refuses(folder, "pytorch_model.bin is not a state dict")


@pytest.mark.parametrize("weight_map", [None, {}, {"a": "../../secrets.safetensors"}, {"a": 1}])
def test_weight_index_bad_raises(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refuses(folder, "model.safetensors.index.json has no valid weight_map")


def test_weight_shard_missing_raises(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1-of-1.safetensors"}}')
    refuses(folder, "model-1-of-1.safetensors is missing")


def test_checkpoint_folder_missing_raises(tmp_path: Path, folder: Path) -> None:
    refuses(tmp_path / "nowhere", "there is no folder .*nowhere")
    refuses("./nowhere/at/all", "there is no folder")
    refuses("nowhere.gguf", "there is no file")
    refuses("nowhere/model.gguf", "there is no file")
    refuses(folder / "config.json", "is no GGUF file; give one, or the folder")
    (folder / "empty.gguf").touch()
    refuses(folder / "empty.gguf", "empty.gguf is empty; download it again")
    (folder / "model.gguf").write_bytes(b"GGUF\x03\0\0\0")
    refuses(folder / "model.gguf", "is broken: it ends after 8 bytes; download it again")
    (tmp_path / "empty").mkdir()
    refuses(tmp_path / "empty", "config.json is missing")
    (folder / "model.safetensors").unlink()
    refuses(folder, "has no weights: expected model.safetensors or pytorch_model.bin")
    (folder / "config.json").write_text("{")
    refuses(folder, "config.json cannot be read as JSON")
    (folder / "config.json").write_text("[]")
    refuses(folder, "config.json does not hold a JSON object")


def test_hub_failures_raise_model_error(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    pattern_lists: list[list[str]] = []

    def listed(_: object, name: str, timeout: float) -> types.SimpleNamespace:
        files = (
            [] if name == "org/absent" else [types.SimpleNamespace(rfilename=file.name) for file in folder.iterdir()]
        )
        return types.SimpleNamespace(siblings=files)

    def fetched(name: str, allow_patterns: list[str], **_: object) -> str:
        pattern_lists.append(allow_patterns)
        if name == "org/absent":
            raise ConnectionError("offline\nand more")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", listed)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    refuses("org/absent", r"'org/absent' is not a folder here .*\(it cannot be reached: .*\); check the name and the ")
    load("org/present", device="cpu")
    assert not any("bin" in pattern or pattern.endswith(".py") for pattern in pattern_lists[-1])
    as_bin(folder, load_file(folder / "model.safetensors"))
    load("org/pickled", device="cpu")
    assert any("bin" in pattern for pattern in pattern_lists[-1])

"""Parity: tiny random checkpoints of each family give transformers' own logits, in float32 to 1e-4."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.simple_cache import DEVICE, SimpleCache, score
from tests.helpers.tiny_checkpoint import edit, save, tiny_model, tiny_tokenizer
from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.checkpoint.hf_config import frequencies, read_config
from triforce.engine.model_loader import Checkpoint, load
from triforce.model.rope import Rope

LENGTH = 96  # past the 32 original positions of the scaled ropes
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
    rope_theta=500000.0,
)
LONGROPE = dict(
    rope_type="longrope",
    original_max_position_embeddings=32,
    factor=4.0,
    rope_theta=10000.0,
    short_factor=[1.0 + i / 10 for i in range(8)],
    long_factor=[2.0 + i for i in range(8)],
)
# As Yarn-Llama-2-7b-128k is published: the old `type` key, and a field that no reader uses.
YARN = dict(type="yarn", factor=32.0, original_max_position_embeddings=32, finetuned=True)
QWEN_YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=32)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("Llama", dict(num_key_value_heads=4)),
    "llama-3": ("Llama", dict(rope_parameters=LLAMA3)),
    "llama-3-tied": ("Llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True, head_dim=32)),
    "llama-linear": ("Llama", dict(rope_scaling=dict(type="linear", factor=4.0), max_position_embeddings=32)),
    "llama-dynamic": ("Llama", dict(rope_scaling=dict(type="dynamic", factor=4.0), max_position_embeddings=32)),
    "llama-longrope": ("Llama", dict(rope_parameters=LONGROPE)),
    "yarn-llama": ("Llama", dict(rope_scaling=YARN, max_position_embeddings=1024, num_key_value_heads=4)),
    "lwm-text": ("Llama", dict(rope_theta=10_000_000, num_key_value_heads=4)),
    "mistral": ("Mistral", dict(sliding_window=None, head_dim=32)),
    "mistral-window": ("Mistral", dict(sliding_window=LENGTH, rope_theta=1e6)),
    "qwen2": ("Qwen2", dict(rope_theta=1e6)),
    "qwen2.5-yarn-tied": ("Qwen2", dict(rope_scaling=QWEN_YARN, max_position_embeddings=32, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=32, rope_theta=1e6)),
    "qwen3-tied": ("Qwen3", dict(head_dim=8, tie_word_embeddings=True)),
}


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Checkpoint]:
    """A model in transformers and in triforce."""
    family, changes = CASES[request.param]
    model = tiny_model(family, **changes)
    return model, load(save(model, tmp_path), device=DEVICE, dtype="float32", context=LENGTH)


def tokens(length: int = LENGTH, rows: int = 2) -> Tensor:
    return torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def reference(model: Any, ids_BT: Tensor) -> Tensor:
    return model(ids_BT).logits.float()


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def steps(decoder: Decoder, ids_BT: Tensor, sizes: list[int]) -> Tensor:
    cache = SimpleCache(decoder.config, len(ids_BT), decoder.device)
    return torch.cat([score(decoder, piece, cache) for piece in ids_BT.split(sizes, dim=1)], dim=1)


def test_family_logits_equal_transformers(pair: tuple[Any, Checkpoint]) -> None:
    model, ours = pair
    ids_BT = tokens()
    expected = reference(model, ids_BT)
    assert expected.std() > 0.5  # logits that differ; closeness of equal logits would say nothing
    close(score(ours.decoder, ids_BT), expected)
    close(steps(ours.decoder, ids_BT, [40, 7, 1] + [1] * (LENGTH - 48)), expected)


def test_family_wrong_rope_is_detected(pair: tuple[Any, Checkpoint]) -> None:
    model, ours = pair
    config = ours.config
    wrong = replace(config, rope=Rope(config.rope.inv_freq_RF * 1.1, config.rope.scale))
    logits = score(ours.decoder, tokens(), SimpleCache(wrong, len(tokens()), DEVICE))
    assert (logits - reference(model, tokens())).abs().max() > 1e-2


def test_selected_columns_equal_whole_logits(tmp_path: Path) -> None:
    decoder = load(save(tiny_model(), tmp_path), device=DEVICE, dtype="float32").decoder
    at_BJ = torch.tensor([[3, 9], [0, 0]])
    full = score(decoder, tokens(10))
    close(score(decoder, tokens(10), at_BJ=at_BJ), full[torch.arange(2)[:, None], at_BJ])
    assert score(decoder, tokens(10), at_BJ=at_BJ[:, :0]).shape == (2, 0, 97)


def test_longrope_is_short_within_original_positions(tmp_path: Path) -> None:
    model = tiny_model("Llama", rope_parameters=LONGROPE)
    folder = save(model, tmp_path)
    ids_BT = tokens(32)
    close(score(load(folder, device=DEVICE, dtype="float32", context=32).decoder, ids_BT), reference(model, ids_BT))
    long_context = load(folder, device=DEVICE, dtype="float32", context=33)
    assert (score(long_context.decoder, ids_BT) - reference(model, ids_BT)).abs().max() > 1e-2


def test_yarn_llama_table_equals_published(tmp_path: Path) -> None:
    """Real sizes: 128K positions out of 4096, scale 0.1 ln 32 + 1 (Peng et al. 2023, arXiv 2309.00071)."""
    save(tiny_model(), tmp_path)
    edit(
        tmp_path / "config.json",
        auto_map={"AutoConfig": "configuration_llama.LlamaConfig", "AutoModelForCausalLM": "modeling.Yarn"},
        rope_parameters=...,
        rope_scaling=YARN | {"original_max_position_embeddings": 4096},
        max_position_embeddings=131072,
    )
    hf = read_config(tmp_path)
    inv_freq_F, scale = frequencies(hf, 131072)
    assert scale == pytest.approx(1.3465735903)
    assert inv_freq_F[0] == 1.0 and inv_freq_F[-1] == pytest.approx(10000 ** (-14 / 16) / 32)
    assert load(tmp_path, device=DEVICE, dtype="float32").config.context == 131072


@pytest.mark.parametrize("form", ["single", "shards", "bin", "bin-shards"])
def test_weight_file_formats_load_alike(tmp_path: Path, form: str) -> None:
    model = tiny_model()
    save(model, tmp_path, max_shard_size="60KB" if form == "shards" else "5GB")
    if form.startswith("bin"):
        (tmp_path / "model.safetensors").unlink()
        old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
        write_bin(tmp_path, model.state_dict() | old, shards=1 + (form == "bin-shards"))
    assert len([*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.bin")]) > ("shards" in form)
    close(score(load(tmp_path, device=DEVICE, dtype="float32").decoder, tokens(8)), reference(model, tokens(8)))


def write_bin(folder: Path, state: dict[str, Tensor], shards: int) -> None:
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    files = {name: f"pytorch_model-0000{i % shards + 1}-of-0000{shards}.bin" for i, name in enumerate(state)}
    for file in set(files.values()):
        torch.save({name: state[name] for name in state if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_logits_close_to_float32(tmp_path: Path, dtype: str) -> None:
    model = tiny_model("Qwen3", head_dim=16)
    decoder = load(save(model, tmp_path), device=DEVICE, dtype=dtype).decoder
    logits = score(decoder, tokens(8))
    assert decoder.dtype == dtype and logits.dtype == torch.float32
    assert (logits - reference(model, tokens(8))).abs().mean() < 0.1


def test_types_and_devices_of_torch_are_taken(tmp_path: Path) -> None:
    device = torch.device(DEVICE)
    loaded = load(save(tiny_model(), tmp_path), device=device, dtype=torch.float16).decoder
    assert (loaded.dtype, torch.device(loaded.device).type) == ("float16", device.type)


def test_matching_weights_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "native", None)  # which packs them
    decoder = load(save(tiny_model(tie_word_embeddings=True), tmp_path), device="cpu").decoder
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs Linux")
    mapped = [line.split()[0].split("-") for line in maps.read_text().splitlines() if str(tmp_path) in line]
    spans = [range(int(low, 16), int(high, 16)) for low, high in mapped]
    assert all(any(t.data_ptr() in span for span in spans) for t in decoder.model.weights.tensors())
    assert decoder.model.weights.head_VC is decoder.model.weights.embedding_VC


def test_padded_vocabulary_rows_are_never_sampled(tmp_path: Path) -> None:
    model = tiny_model(vocab_size=320)
    model.model.embed_tokens.weight.data[300:] = torch.nan
    save(model, tmp_path)
    tokenizer = tiny_tokenizer(300)
    tokenizer.save_pretrained(tmp_path)
    ours = load(tmp_path, device=DEVICE, dtype="float32")
    assert ours.config.vocab_size == ours.tokenizer.vocab_size == len(tokenizer) < 320
    close(score(ours.decoder, tokens(8)), reference(model, tokens(8))[..., : len(tokenizer)])


def test_fingerprint_differs_between_models(tmp_path: Path) -> None:
    model = tiny_model(rope_parameters=LONGROPE)
    folder = save(model, tmp_path / "a")
    original = load(folder, device=DEVICE, dtype="float32")
    assert load(folder, device=DEVICE, dtype="float32", context=100).fingerprint == original.fingerprint
    assert load(folder, device=DEVICE, dtype="float32", context=32).fingerprint != original.fingerprint
    assert load(folder, device=DEVICE, dtype="bfloat16").fingerprint != original.fingerprint
    model.lm_head.weight.data[-1, -1] += 1
    assert load(save(model, tmp_path / "b"), device=DEVICE, dtype="float32").fingerprint != original.fingerprint

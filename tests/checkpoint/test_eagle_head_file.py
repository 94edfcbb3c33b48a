"""EAGLE heads from files: EAGLE-3 checkpoints as published, this project's own, misfits and damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.helpers.eagle3_reference import Eagle3, random_checkpoint
from tests.helpers.tiny_checkpoint import edit, save, tiny_model
from triforce.eagle.head import EagleHeadWeights, shapes
from triforce.eagle.head_files import (
    EagleHeadFile,
    default_state_layers,
    new_config,
    read_eagle_head,
    with_head,
    write_eagle_head,
)
from triforce.eagle.torch_passes import EagleHeadLayer, Entries, eagle_head_tensors
from triforce.engine.model_loader import load
from triforce.errors import ModelError
from triforce.model.config import ModelConfig

torch.set_num_threads(1)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True},
    {"fc_norm": True, "norm_output": True},
    {"num_key_value_heads": 2, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Return a target of eight layers: published drafts read the states behind layers 2, 4 and 5."""
    model = tiny_model(num_hidden_layers=8)
    return load(save(model, tmp_path_factory.mktemp("target")), device="cpu", dtype="float32").config


def published(folder: Path, **changes: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Write a checkpoint as published."""
    tensors, config = random_checkpoint(**changes)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors, config


@pytest.mark.parametrize("changes", VARIANTS, ids=["llama", "before", "eagle-3.1", "qwen3"])
def test_published_checkpoint_gives_published_logits(
    changes: dict[str, Any], target: ModelConfig, tmp_path: Path
) -> None:
    """A prompt of 12 tokens is one pass. Three draft tokens follow, each from the one before."""
    tensors, config = published(tmp_path, **changes)
    draft = read_eagle_head(tmp_path, target, "any")
    draw = torch.Generator().manual_seed(5)
    ids_T = torch.randint(97, (12,), generator=draw)
    states_TX = torch.randn(11, 3 * 64, generator=draw)
    embedding_VC = torch.randn(97, 64, generator=draw)
    reference = Eagle3(tensors, config, embedding_VC)
    layer = EagleHeadLayer(draft.config, eagle_head_tensors(draft.weights, "float32", "cpu"))
    hidden_C = reference.prefill(states_TX, ids_T[1:].tolist())
    slots_1T = torch.arange(1, 12)[None]
    fused_1TC = layer.fuse(states_TX[None])
    embedded_1TC = embedding_VC[ids_T[1:]][None]
    prompt_entries = layer.entries(fused_1TC, embedded_1TC, slots_1T)
    out_1TC, next_1TC, _ = layer.step(fused_1TC, embedded_1TC, slots_1T, prompt_entries, slots_1T)
    out_11C = out_1TC[:, -1:]
    fused_11C = next_1TC[:, -1:]
    chain = list[Entries]()
    head_MC = layer.weights.head_MC
    last_11 = slots_1T[:, -1:]
    assert head_MC is not None and draft.weights.tokens_M.tolist() == tensors["t2d"].nonzero().flatten().tolist()
    for step in range(1, 4):
        wanted_M = reference.logits(hidden_C)
        torch.testing.assert_close((out_11C[0, 0] @ head_MC.T).double(), wanted_M, atol=2e-4, rtol=2e-4)
        draft_token = int(draft.weights.tokens_M[wanted_M.argmax()])
        hidden_C = reference.entry(reference.handed_on(hidden_C), draft_token)
        embedded_11C = embedding_VC[draft_token][None, None]
        out_11C, fused_11C, chain_entry = layer.step(
            fused_11C, embedded_11C, last_11 + step, prompt_entries, last_11, chain
        )
        chain.append(chain_entry)


def test_published_layers_are_counted_as_engines_do(target: ModelConfig, tmp_path: Path) -> None:
    layers_by_kind = {
        (): (2, 4, 5),
        ("eagle_aux_hidden_state_layer_ids", (2, 3, 7)): (2, 3, 7),
        ("eagle_config", (1, 3, 4)): (2, 4, 5),
    }
    for layer_kind, layers in layers_by_kind.items():
        ids = {"eagle_aux_hidden_state_layer_ids": list(layer_kind[1])} if layer_kind else {}
        published(tmp_path, **({"eagle_config": ids} if layer_kind and layer_kind[0] == "eagle_config" else ids))
        assert read_eagle_head(tmp_path, target, "any").config.state_layers == layers


def random_draft(target: ModelConfig, seed: int = 0) -> EagleHeadFile:
    """Return a random draft of this project's own."""
    config = new_config(target, 24)
    draw = torch.Generator().manual_seed(seed)
    named = {
        name: torch.randn(shape, generator=draw).bfloat16().float().numpy() for name, shape in shapes(config).items()
    }
    weights = EagleHeadWeights(**named, tokens_M=torch.randperm(97, generator=draw)[:24].sort().values.numpy())
    return EagleHeadFile(config, weights, "fingerprint", {"minutes": 1.5})


def test_written_draft_reads_back_whole(target: ModelConfig, tmp_path: Path) -> None:
    draft = random_draft(target)
    write_eagle_head(tmp_path, draft)
    loaded = read_eagle_head(tmp_path, target, "fingerprint")
    assert loaded.card == draft.card and loaded.weights.head_MC is None
    assert [name for name, _ in loaded.weights.trained_tensors()] == [
        name for name, _ in draft.weights.trained_tensors()
    ]
    for (_, loaded_weight), (_, draft_weight) in zip(
        loaded.weights.trained_tensors(), draft.weights.trained_tensors(), strict=True
    ):
        assert np.array_equal(loaded_weight, draft_weight)
    assert np.array_equal(loaded.weights.tokens_M, draft.weights.tokens_M)
    rope = loaded.config.rope
    draft_rope = draft.config.rope
    assert np.array_equal(rope.inv_freq_RF, draft_rope.inv_freq_RF) and rope.scale == draft_rope.scale
    fields = [name for name in loaded.config.__dataclass_fields__ if name != "rope"]
    assert [getattr(loaded.config, name) for name in fields] == [getattr(draft.config, name) for name in fields]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    head_MC = np.zeros((24, 64), np.float32)
    assert with_head(loaded.weights, head_MC).head_MC is head_MC


def test_draft_of_another_target_is_refused(target: ModelConfig, tmp_path: Path) -> None:
    write_eagle_head(tmp_path, random_draft(target))
    with pytest.raises(ModelError, match="another model, or of this one in another dtype; make one"):
        read_eagle_head(tmp_path, target, "another")
    assert read_eagle_head(tmp_path, target, "another", finetune=True).target == "fingerprint"


def test_draft_of_another_shape_is_always_refused(target: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    write_eagle_head(tmp_path / "own", random_draft(target))
    for field, size in (("hidden size", dict(hidden_size=32)), ("KV heads", dict(num_key_value_heads=4)),
                       ("head size", dict(head_dim=32)), ("layers", dict(num_hidden_layers=3))):  # fmt: skip
        model = tiny_model(**({"num_hidden_layers": 8} | size))
        other_config = load(save(model, tmp_path / field), device="cpu", dtype="float32").config
        with pytest.raises(ModelError, match=field):
            read_eagle_head(tmp_path / "own", other_config, "fingerprint", finetune=True)


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def swap_tokens(folder: Path) -> None:
    tensors, _ = random_checkpoint()
    tensors["d2t"][3] += 1
    save_file(tensors, folder / "model.safetensors")


def without(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors, _ = random_checkpoint()
        save_file({key: tensor for key, tensor in tensors.items() if key != name}, folder / "model.safetensors")

    return change


def poison(folder: Path) -> None:
    tensors, _ = random_checkpoint()
    tensors["fc.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "corrupt"),
        (swap_tokens, "d2t"),
        (without("d2t"), "d2t"),
        (without("norm.weight"), r"norm\.weight"),
        (poison, "NaN"),
        (lambda folder: edit(folder / "config.json", draft_vocab_size=21), "shape"),
        (lambda folder: edit(folder / "config.json", draft_vocab_size=...), "draft_vocab_size"),
        (lambda folder: edit(folder / "config.json", num_hidden_layers=2), "num_hidden_layers"),
        (lambda folder: edit(folder / "config.json", fc_norm=True), "fc_norm"),
        (lambda folder: edit(folder / "config.json", eagle_aux_hidden_state_layer_ids=[0, 2, 3]), "layers"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (lambda folder: (folder / "config.json").write_text("{"), "JSON"),
    ],
)  # fmt: skip
def test_damaged_draft_raises_model_error(
    damage: Callable[[Path], object], message: str, target: ModelConfig, tmp_path: Path
) -> None:
    published(tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelError, match=message):
        read_eagle_head(tmp_path, target, "any")


def test_new_draft_reads_between_layers() -> None:
    assert [default_state_layers(layers) for layers in (2, 3, 6, 30, 32)] == [
        (1,),
        (1, 2),
        (2, 3, 5),
        (2, 15, 29),
        (2, 16, 31),
    ]

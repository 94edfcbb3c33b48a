"""Models of random weights in shapes of families: experts that routers choose as asked, and the bytes of a pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.family_models import family_model
from tests.helpers.tiny_checkpoint import save
from triforce.backends import dispatch
from triforce.backends.kernel_api import pages_for
from triforce.bench.kernels import MeasuredModel, expert_union, filled_view
from triforce.bench.roofline import ModelWork
from triforce.bench.shapes import FAMILY_SHAPES
from triforce.checkpoint.hf_config import checked
from triforce.checkpoint.model_families import FAMILIES
from triforce.checkpoint.weights import read_weights
from triforce.cli.info import int8_weights
from triforce.engine.model_loader import load
from triforce.kvcache import PagePool
from triforce.model.weights import numbers

if dispatch.native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
torch.set_num_threads(1)
CONTEXT = 96
SMALL = {"num_hidden_layers": 12, "hidden_size": 256, "moe_intermediate_size": 256, "vocab_size": 512,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All shapes are small; what routers see is as in the large ones."""
    for name in ("qwen3-30b-a3b", "qwen3-30b-a3b-uniform"):
        shape = FAMILY_SHAPES[name]
        monkeypatch.setitem(FAMILY_SHAPES, name, replace(shape, config={**shape.config, **SMALL}))
    shape = FAMILY_SHAPES["gpt-oss-20b"]
    inner = {"num_hidden_layers": 4, "intermediate_size": 128, "hidden_size": 128, "sliding_window": 32}
    monkeypatch.setitem(FAMILY_SHAPES, "gpt-oss-20b", replace(shape, config={**shape.config, **SMALL, **inner}))
    yield


@pytest.mark.parametrize(
    ("name", "unions"),
    [("qwen3-30b-a3b", {2: 1.6, 4: 2.45, 8: 3.55}), ("qwen3-30b-a3b-uniform", {2: 1.94, 4: 3.64, 8: 6.45})],
)
def test_pass_reads_experts_as_asked(small: None, name: str, unions: dict[int, float]) -> None:
    model = MeasuredModel(name, CONTEXT + 64)
    view = filled_view(PagePool(model.config, 1, pages_for(CONTEXT + 64), "bfloat16"), CONTEXT)
    for width, wanted in unions.items():
        assert expert_union(model.decoder, view, width) == pytest.approx(wanted, rel=0.08)
    assert expert_union(model.decoder, view, 1) == 1


def test_work_counts_chosen_experts_and_keys_of_windows(small: None) -> None:
    model = MeasuredModel("gpt-oss-20b", CONTEXT + 64)
    one, more = model.work.pass_work(1, CONTEXT), model.work.pass_work(2, CONTEXT, union=1.5)
    expert = 4 * 3 * 128 * 128 * 22 // 32  # of each layer, in Q5_0
    assert more.bytes - one.bytes == 2 * expert  # 4 experts of a token, 6 of two
    dense = 2 * (4 * (2 * 128 * 256 + 2 * 128 * 128) + 512 * 128)
    kv = 2 * 2 * 2 * 64 * (2 * CONTEXT + 2 * 32)
    assert one.bytes == dense + 4 * expert + kv


def test_shared_experts_and_layers_without_any_are_counted(tmp_path: Path) -> None:
    """By a config as in the weights themselves: all of them, those of a token, and int8 copies."""
    checkpoint = load(save(family_model("glm-4.5"), tmp_path), device="cpu", dtype="float32")
    config, names = checkpoint.config, FAMILIES["glm4_moe"].names
    weights = read_weights(
        tmp_path, checkpoint.files.archives(packed=False), config, rows=97, dtype="float32", names=names
    )
    multiplied = [numbers(weight) for weight in weights.product_matrices()]
    routers = 3 * 12 * 64
    assert config.parameters == sum(numbers(weight).size for weight in weights.tensors())
    assert config.matrix_weights == sum(weight.size for weight in multiplied) + routers
    assert int8_weights(config, 0) == config.matrix_weights + 4 * sum(len(weight) for weight in multiplied)
    one, more = ModelWork(config, weights).pass_work(1, 0), ModelWork(config, weights).pass_work(2, 0, union=1.5)
    assert one.bytes == 4 * (config.weights_read - routers)
    assert more.bytes - one.bytes == 4 * config.expert_weights * 5 // 2  # 3 experts of a token and 2 shared ones, half
    assert one.operations["bfloat16"] == 2 * (config.weights_read - routers)


@pytest.mark.parametrize("name", FAMILY_SHAPES)
def test_family_shape_has_published_proportions(name: str) -> None:
    config = checked(dict(FAMILY_SHAPES[name].config))
    experts = config.architecture.experts
    wanted = {
        "qwen3-30b-a3b": (2048, 768, (128, 8)), "qwen3-30b-a3b-uniform": (2048, 768, (128, 8)),
        "gpt-oss-20b": (2880, 2880, (32, 4)), "gemma-3-4b": (2560, 10_240, None),
    }  # fmt: skip
    assert (config.hidden_size, config.intermediate_size, experts and (experts.count, experts.chosen)) == wanted[name]

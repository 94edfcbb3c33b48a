"""What tokens read, by configs; from where on speculation pays by bytes; and what `info` says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from tests.helpers.tiny_checkpoint import tiny_model
from triforce.cli import main
from triforce.model.architecture import Architecture, Experts, LayerKind
from triforce.model.break_even import (
    GAIN,
    STEP,
    kv_read,
    pays_from,
    speedup,
    weights_read,
    why_not,
)
from triforce.model.config import ModelConfig
from triforce.model.expert_unions import experts_touched
from triforce.model.rope import Rope
from triforce.planner.tier_work import LEAST_BYTES, TierWork

LLAMA_8B = ModelConfig(
    128_256, 4096, 14_336, 32, 32, 8, 128, 1e-5, tied=False, context=131_072, rope=Rope(torch.ones(64), 1.0)
)
WINDOWS = tuple(LayerKind(window=128 if layer % 4 else 0) for layer in range(32))


def test_kv_read_by_windows_is_bounded() -> None:
    windowed = replace(LLAMA_8B, architecture=Architecture(kinds=WINDOWS))
    assert kv_read(LLAMA_8B, 1000) == 1000 * LLAMA_8B.kv_size
    assert kv_read(windowed, 1000) == 2 * 8 * 128 * (8 * 1000 + 24 * 128)
    assert kv_read(windowed, 100) == 100 * LLAMA_8B.kv_size


def test_experts_touched_equal_mean_of_draws() -> None:
    chance = Random(0)
    draws = [len({e for _ in range(4) for e in chance.sample(range(16), 3)}) for _ in range(20_000)]
    mean = sum(draws) / len(draws)
    assert experts_touched(Experts(16, 3, True), 4) == pytest.approx(mean, rel=0.01)
    assert experts_touched(Experts(16, 3, True, shared=2), 4) == pytest.approx(mean + 2, rel=0.01)


@pytest.mark.parametrize("weight", [0.6, 2.0])
def test_speculation_pays_from_the_first_context_that_gains(weight: float) -> None:
    begins = pays_from(LLAMA_8B, 2048, weight, 2.0)
    assert begins is not None
    assert speedup(LLAMA_8B, begins, 2048, weight, 2.0) >= GAIN > speedup(LLAMA_8B, begins - STEP, 2048, weight, 2.0)


def test_speculation_by_windows_or_experts_pays_later() -> None:
    begins = pays_from(LLAMA_8B, 2048, 0.6, 2.0)
    windowed = replace(LLAMA_8B, architecture=Architecture(kinds=WINDOWS))
    mixture = replace(LLAMA_8B, intermediate_size=1792, architecture=Architecture(experts=Experts(64, 8, True)))
    assert begins is not None
    for other in (windowed, mixture):
        assert (pays_from(other, 2048, 0.6, 2.0) or LLAMA_8B.context) > begins
    short = replace(windowed, context=8192)
    assert pays_from(short, 2048, 0.6, 2.0) is None
    assert why_not(short, 0.6, 2.0).startswith("24 of 32 layers have a window of 128: at 8,192 tokens KV is 0.0")


@pytest.mark.parametrize(
    "parts",
    [
        Architecture(experts=Experts(64, 8, True)),
        Architecture(experts=Experts(64, 8, True, shared=1), dense_layers=3, dense_size=14_336),
    ],
    ids=["alike", "shared and dense"],
)
def test_work_of_a_pass_has_the_experts_that_some_token_chooses(parts: Architecture) -> None:
    """On a machine whose operations take no time: what is read, of any rows and widths."""
    mixture = replace(LLAMA_8B, intermediate_size=1792, architecture=parts)

    def read(width: float, rows: int = 1, sequential: bool = False) -> float:
        work = TierWork.of(mixture, 2.0, 2.0, sequential)
        return float(work.bytes(width, rows, 0.0, 1e12, 0.0, 1.0)) - LEAST_BYTES

    for width in (1, 2, 4, 8):
        assert read(width) == pytest.approx(2 * weights_read(mixture, width), rel=1e-6)
    assert read(2, rows=4) == pytest.approx(read(8), rel=1e-6)
    assert read(4, sequential=True) == pytest.approx(4 * read(1), rel=1e-6)


def test_info_says_why_speculation_should_not_pay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("Mistral", sliding_window=24).config.save_pretrained(tmp_path)
    assert main(["info", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "should not pay without a draft model: 2 of 2 layers have a window of 24: at 128 tokens KV is" in said
    assert "a token reads" in said and "of KV at 128 tokens" in said

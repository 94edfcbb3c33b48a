"""`triforce info`: what it counts of a model, and what it says of the machine."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.eagle_pair import eagle_pair
from tests.planner.test_break_even import LLAMA_8B
from triforce.backends import dispatch
from triforce.bench import roofline
from triforce.bench.roofline import Roofline
from triforce.checkpoint.hub import FINETUNE
from triforce.cli import main
from triforce.cli.bench import setup
from triforce.cli.bench.setup import about
from triforce.cli.info import size
from triforce.cli.machine_rates import measure_balances
from triforce.eagle.head_files import read_eagle_head
from triforce.engine.model_loader import load
from triforce.kvcache.eagle_memory import EagleHeadMemory
from triforce.kvcache.pool import max_window_pages
from triforce.planner.break_even import balance_of
from triforce.planner.pass_costs import BALANCES


def test_info_works_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The counts are those of transformers' own model, and no weight file is there to be read."""
    import transformers

    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    biases = dict(attention_bias=True, mlp_bias=True)
    for family, more in (("Llama", {}), ("Llama", biases), ("Qwen2", {}), ("Qwen3", {})):
        config = getattr(transformers, f"{family}Config")(
            **sizes, **more, num_key_value_heads=2, head_dim=16, max_position_embeddings=8192
        )
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        config.save_pretrained(tmp_path)
        assert main(["info", str(tmp_path), "--dtype", "bfloat16"]) == 0
        lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        weights = sum(weight.numel() for weight in model.parameters())
        assert lines["parameters"] == f"{weights / 1e6:.1f} million: {size(2 * weights)} as bfloat16"
        assert lines["KV"] == f"cache           {2 * 2 * 2 * 16 * 2} bytes per token as bfloat16"
        assert lines["8,192"].split() == ["tokens", "2", "MiB"]
        assert "beside the weights" in lines["fits"] and lines["fits"].endswith("one text has at most 8,192")
        assert main(["info", str(tmp_path), "--dtype", "bfloat16", "--lower-tiers", "int8"]) == 0
        lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        matrices = [weight for weight in model.parameters() if weight.ndim == 2]
        copies = sum(weight.numel() + 4 * len(weight) for weight in matrices[not model.config.tie_word_embeddings :])
        assert lines["parameters"].endswith(f" as bfloat16, and {size(copies)} as int8")
        assert lines["KV"].endswith(f" per token as bfloat16, and {2 * 2 * 2 * 16 + 2 * 2 * 2 * 4 // 16} bytes as int8")
        assert lines["8,192"].split() == ["tokens", "3.0", "MiB"]
        assert main(["info", str(tmp_path), "--dtype", "bfloat16", "--kv-dtype", "int8"]) == 0
        lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        assert lines["KV"] == f"cache           {2 * 2 * 2 * (16 + 2)} bytes per token as int8"


def test_info_counts_entries_of_draft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a draft that is taken for a known model and reads its states: as many bytes as a run has of each."""
    target = load(eagle_pair(tmp_path) / "target", device="cpu", dtype="bfloat16")
    config = read_eagle_head(tmp_path / "draft", target.config, "", finetune=True).config
    entries = EagleHeadMemory(config.layer, 1, "bfloat16", "cpu").token_bytes
    monkeypatch.setattr("triforce.cli.info.draft_for", lambda *_: f"{FINETUNE}{tmp_path / 'draft'}")
    asked = ["info", str(tmp_path / "target"), "--dtype", "bfloat16"]
    row = target.config.kv_bytes(2)
    for more, counted in (([], entries), (["--kv-offload", "host", "--kv-memory", "1MiB"], 0)):
        assert main([*asked, *more]) == 0
        lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        assert lines["KV"].endswith(f"; {entries} bytes per token of its draft") == bool(counted)
        longest = target.config.context
        assert lines[f"{longest:,}"].split(maxsplit=1)[1] == size(longest * (row + counted))


@pytest.mark.skipif(dispatch.native is None, reason="numbers without native kernels")
def test_info_counts_experts_of_four_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As kernels have them, 22 bytes of 32 weights, and without copies for lower tiers."""
    import transformers

    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.GptOssConfig(**sizes, num_key_value_heads=2, head_dim=16, num_local_experts=4)
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(tmp_path)
    count = sum(weight.numel() for weight in transformers.GptOssForCausalLM(transformers.GptOssConfig(
        **sizes, num_key_value_heads=2, head_dim=16, num_local_experts=4)).parameters())  # fmt: skip
    experts = 2 * 4 * 3 * 64 * 96
    weights = 2 * (count - experts) + experts * 22 // 32
    for lower, copied in (("same", 0), ("int4", 1)):
        assert main(["info", str(tmp_path), "--dtype", "bfloat16", "--lower-tiers", lower]) == 0
        lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        matrices = 2 * (2 * 64 * 6 * 16 + 4 * 64) + 97 * 64
        copies = f", and {size(matrices * 5 // 8)} as int4" * copied
        assert lines["parameters"] == f"{count / 1e6:.1f} million: {size(weights)} as MXFP4{copies}"


@pytest.mark.parametrize(
    ("family", "full", "changes"),
    [
        ("Mistral", 0, dict(sliding_window=64)),
        ("Qwen2", 1, dict(use_sliding_window=True, sliding_window=64, max_window_layers=1)),
    ],
)
def test_info_counts_windows_once_they_are_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, full: int, changes: dict[str, Any]
) -> None:
    import transformers

    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4)
    config = getattr(transformers, f"{family}Config")(
        **sizes, **changes, num_key_value_heads=2, head_dim=16, max_position_embeddings=65_536
    )
    config.save_pretrained(tmp_path)
    assert main(["info", str(tmp_path), "--dtype", "bfloat16"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    most, layer = 16 * max_window_pages(64, 512), 2 * 2 * 16 * 2
    assert lines["KV"].endswith(f"; {4 - full} of 4 layers keep at most {most:,} tokens of a text")
    for tokens in (4_096, 65_536):
        held = layer * (full * tokens + (4 - full) * most)
        assert lines[f"{tokens:,}"].split(maxsplit=1)[1] == size(held)
    assert lines["fits"].startswith("65,536 tokens of one text") and "the whole context" in lines["fits"]


def test_info_and_benchmarks_name_level_and_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("machine")]
    level = dispatch.native.level() if dispatch.native else "torch"
    assert re.search(rf" cores, kernels {level}, torch .*, reads \d+ GB/s", line)
    assert dispatch.native is None or re.search(r"computes float32 [\d,]+, .*int8 [\d,]+ GFLOP/s", line)
    assert line.endswith(about()["machine"])


HERE = Roofline(1e10, {"float32": 1e11, "bfloat16": 2e11, "int16": 3e11, "int8": 6e11})
SHAPE = dict(
    vocab_size=32_000, hidden_size=2048, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, max_position_embeddings=16_384,
)  # fmt: skip
EXPERTS = dict(moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8)
SAID: dict[str, tuple[str, dict[str, Any], Roofline, str]] = {
    "dense": ("Llama", dict(intermediate_size=6144), HERE, "should pay from 11,264 tokens on, without a draft model"),
    "windows": (
        "Mistral", dict(intermediate_size=6144, sliding_window=512), HERE,
        "should not pay without a draft model: 16 of 16 layers have a window of 512: at 16,384 tokens KV is 0.02 of",
    ),
    "experts": (
        "Qwen3Moe", EXPERTS, HERE,
        "should not pay without a draft model: a pass of 4 tokens reads 3.6 times the experts of one token",
    ),
    "arithmetic": (
        "Llama", dict(intermediate_size=6144), Roofline(1e11, {"bfloat16": 2e11}),
        "should not pay without a draft model: the machine can compute a pass of 2.0 tokens while it reads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_info_says_from_where_on_speculation_should_pay(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    family, changes, here, said = SAID[name]
    getattr(transformers, f"{family}Config")(**SHAPE | changes).save_pretrained(tmp_path)
    monkeypatch.setattr("triforce.cli.machine_rates.measured_roofline", lambda: here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["info", str(tmp_path), "--dtype", "bfloat16", "--device", "cpu"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["speculation"].startswith(said)
    most = here.balance({"bfloat16": 1})
    assert lines["basis"].startswith(f"of that    {most:.0f} operations with weights while a byte is read")
    assert "(measured here)" in lines["basis"] and " of KV at 16,384 tokens" in lines["a"]


def test_balance_is_that_of_the_numbers_that_are_multiplied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Attention over int8 KV has scores of bytes, and weights of 16 bits."""
    config = LLAMA_8B
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("triforce.cli.machine_rates.measured_roofline", lambda: HERE)
    measure_balances()
    assert balance_of(False, config, "float32", "cpu")[0] == pytest.approx((10, 10))
    assert balance_of(True, config, "bfloat16", "cpu")[0] == pytest.approx((30, 20))
    assert balance_of(True, replace(config, kv_int8=True), "bfloat16", "cpu")[0] == pytest.approx((30, 40))
    usual = [balance_of(False, config, "float16", name) for name in ("cpu", "cuda")]
    monkeypatch.setattr("triforce.cli.machine_rates.measured_roofline", lambda: Roofline(1e10, {}))
    measure_balances()
    usual.append(balance_of(False, config, "float32", "cpu"))
    assert {known for _, known in usual} == {"typical, not measured"}
    assert usual[0] == usual[2] and usual[1][0].weights == BALANCES[-1]


def test_info_measures_machine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[Roofline] = []
    monkeypatch.setattr(roofline, "measure", lambda: turns.append(HERE) or HERE)
    for kept in (setup.machine, setup.measured_roofline):
        kept.cache_clear()
    assert main(["info"]) == 0
    for kept in (setup.machine, setup.measured_roofline):
        kept.cache_clear()
    assert turns == [HERE]

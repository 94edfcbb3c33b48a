"""Costs learnt from passes: exact for observed work, sane for other work, and saved from run to run."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.laws.tiny import MODELS
from triforce.arrays import DType
from triforce.planner import CostModel, cost_model
from triforce.planner.cost_model import costs_path
from triforce.planner.pass_costs import MAX_KINDS, TierWork
from triforce.planner.planner_config import AMONG_MODELS, CONFIG
from triforce.planner.searched_layers import Finding


def true(tokens: int, keys: int) -> float:
    return 2e-3 + 1e-4 * tokens + 2e-7 * keys + 1e-8 * tokens * keys


def learnt(path: Path | None = None) -> CostModel:
    """Return costs learnt from noisy passes of several widths and contexts."""
    generator = random.Random(1)
    costs = CostModel(path)
    for _ in range(400):
        tokens = generator.choice((1, 2, 5, 9))
        keys = generator.choice((1000, 8000, 30_000))
        costs.passes.observe("full", tokens, 1, keys, true(tokens, keys) * generator.uniform(0.9, 1.1))
    return costs


@pytest.mark.parametrize("tokens", [1, 8, 17])
@pytest.mark.parametrize("keys", [1000, 20_000, 60_000])
def test_costs_predict_pass_seconds(tokens: int, keys: int) -> None:
    assert learnt().passes.seconds("full", tokens, 1, keys) == pytest.approx(true(tokens, keys), rel=0.15)


def test_costs_follow_slower_machine() -> None:
    costs = learnt()
    costs.passes.observe("full", 1, 1, 8000, 1.0)  # an outlier
    assert costs.passes.seconds("full", 1, 1, 8000) < 1.5 * true(1, 8000)
    for _ in range(600):
        costs.passes.observe("full", 1, 1, 8000, 4 * true(1, 8000))
    assert costs.passes.seconds("full", 1, 1, 8000) == pytest.approx(4 * true(1, 8000), rel=0.3)


def test_costs_of_unvaried_width_are_bounded() -> None:
    costs = CostModel()
    for _ in range(20):
        costs.passes.observe("draft", 1, 1, 0, 1e-4)
        costs.passes.observe("full", 1, 1, 500, 1e-3)
    assert costs.passes.seconds("draft", 1, 1, 0) == pytest.approx(1e-4)
    assert 0.9e-4 <= costs.passes.seconds("draft", 4, 1, 0) <= 4.1e-4
    assert 0.9e-3 <= costs.passes.seconds("full", 4, 1, 500) <= 4e-3
    assert costs.passes.of("draft").count == 20 and not costs.passes.of("retrieval").count


def test_dear_passes_of_short_contexts_say_nothing_of_long_ones() -> None:
    """Passes among other models cost four times as much at 600 tokens; costs at 30,000 tokens are not scaled by it."""
    costs = learnt()
    for width in (2, 3, 4):
        costs.passes.observe(AMONG_MODELS, width, 1, 600, 4 * true(width, 600), 4)
    assert costs.passes.seconds(AMONG_MODELS, 4, 1, 600) == pytest.approx(4 * true(4, 600), rel=0.2)
    assert costs.passes.seconds(AMONG_MODELS, 8, 1, 30_000) == pytest.approx(true(8, 30_000), rel=0.2)


def test_acceptance_is_stored_and_bounded(tmp_path: Path) -> None:
    costs = CostModel(tmp_path / "costs.json")
    case = "draft", 0, 0, 1.0
    for _ in range(1000):
        costs.acceptance.add(case, 3, 1)
    assert sum(costs.acceptance.verdicts[case]) <= CONFIG.history_limit + 1e-6
    costs.save()
    assert CostModel(costs.path).acceptance.expected_acceptance(case) == costs.acceptance.expected_acceptance(case)
    assert costs.acceptance.expected_acceptance(case)[0] > 0.73


def test_costs_are_stored_and_restored(tmp_path: Path) -> None:
    path = tmp_path / "new" / "costs.json"
    costs = learnt(path)
    costs.save()
    assert CostModel(path).passes.seconds("full", 3, 1, 9000) == pytest.approx(
        costs.passes.seconds("full", 3, 1, 9000), rel=1e-3
    )
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]


def test_layer_costs_are_stored_and_restored(tmp_path: Path) -> None:
    costs = CostModel(tmp_path / "costs.json")
    costs.findings |= {"15": Finding([1], [2]), "16": Finding(trial=3, baseline_verdicts=[4, 5], trial_verdicts=[6, 0])}
    costs.save()
    assert CostModel(costs.path).findings == costs.findings


def busy(costs: CostModel, times: float, tiers: tuple[str, ...], passes: int = 100) -> None:
    """Observe passes that take `times` the seconds of a quiet machine."""
    generator = random.Random(3)
    for _ in range(passes):
        for tier in tiers:
            width = generator.choice((1, 3, 7))
            costs.passes.observe(tier, width, 1, 8000, times * true(width, 8000) * generator.uniform(0.95, 1.05))


@pytest.mark.parametrize("times", [0.4, 3.0])
def test_costs_from_busy_machine_are_corrected(times: float, tmp_path: Path) -> None:
    costs = CostModel(tmp_path / "costs.json")
    busy(costs, times, ("full", "retrieval"))
    costs.save()
    reloaded = CostModel(costs.path)
    assert reloaded.passes.seconds("retrieval", 3, 1, 8000) == pytest.approx(times * true(3, 8000), rel=0.2)
    busy(reloaded, 1.0, ("full",), passes=70)
    for tier in ("full", "retrieval"):  # the retrieval tier has not run since
        assert reloaded.passes.seconds(tier, 3, 1, 8000) == pytest.approx(true(3, 8000), rel=0.2)


def test_costs_of_new_contexts_keep_machine_speed() -> None:
    """Longer contexts than before may cost anything. Their cost does not make the machine seem slower."""
    costs = CostModel()
    for _ in range(100):
        costs.passes.observe("full", 1, 1, 500, 1e-3)
        costs.passes.observe("retrieval", 1, 1, 500, 1e-3)
    for _ in range(100):
        costs.passes.observe("full", 1, 1, 32_000, 20e-3)
    assert costs.passes.seconds("retrieval", 1, 1, 500) == pytest.approx(1e-3, rel=0.1)
    assert costs.passes.seconds("full", 1, 1, 32_000) == pytest.approx(20e-3, rel=0.3)


@pytest.mark.parametrize("damage", ["", "{", "[]", "7\n[]", "[" * 100_000, "cut", "changed", "earlier"])
def test_corrupt_cost_file_is_replaced(damage: str, tmp_path: Path) -> None:
    costs = learnt(tmp_path / "costs.json")
    costs.findings["15"] = Finding([1])
    costs.save()
    assert costs.path and CostModel(costs.path).findings == costs.findings
    valid_text = costs.path.read_text()
    text = {"cut": valid_text[:-9], "changed": valid_text.replace("full", "fool"), "earlier": valid_text.split("\n")[1]}
    costs.path.write_text(text.get(damage, damage))
    reloaded = CostModel(costs.path)
    assert not (reloaded.findings or reloaded.passes.tiers or reloaded.acceptance.verdicts)
    reloaded.passes.observe("full", 1, 1, 1, 1.0)
    assert reloaded.passes.seconds("full", 1, 1, 1) == pytest.approx(1.0)


def path_of(*models: str, dtype: DType = "bfloat16") -> Path | None:
    return costs_path([*models], "cpu", dtype)


def test_missing_home_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert path_of("a", "b") is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(path_of("a", "b")).startswith("/somewhere/triforce/costs-cpu-") and path_of("a", "b") != path_of(
        "a", "c"
    )


def test_cost_file_is_keyed_by_version_dtype_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    native_path = path_of("a")
    assert "-bfloat16-" in str(native_path) and "-float32-" in str(path_of("a", dtype="float32"))
    monkeypatch.setattr(cost_model, "version_of", lambda name: "another")
    second_path = path_of("a")
    assert second_path != native_path
    monkeypatch.setattr(cost_model.dispatch, "native", None)
    assert path_of("a") not in (native_path, second_path) and "-torch-" in str(path_of("a"))


def test_unwritable_cost_folder_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    learnt(tmp_path / "file" / "costs.json").save()


def test_unknown_widths_follow_two_bounds() -> None:
    """Operations bound wide passes, bytes narrow ones. Two observed widths show where the bounds meet."""
    costs = CostModel()

    def bound(width: int) -> float:
        return max(1e-3, 2.5e-4 * width)

    for width in (1, 2, 12) * 6:
        costs.passes.observe("full", width, 1, 0, bound(width))
    for width in (3, 4, 8, 16):
        assert costs.passes.seconds("full", width, 1, 0) == pytest.approx(bound(width), rel=0.3)


def test_noise_of_single_tokens_does_not_forbid_wide_passes() -> None:
    """The profile is of plain decoding on a busy machine. One of its contexts was interrupted."""
    costs = CostModel(works={"full": TierWork(30, 9.7e7, 23_040, 0.72, 2.0, 3)})
    for keys, ms in ((532, 4.68), (628, 5.01), (2151, 6.31), (6097, 15.35), (7261, 9.4)):
        costs.passes.observe("full", 1, 1, keys, ms / 1000, passes=4)
    assert costs.passes.seconds("full", 5, 1, 2048) < 2.5 * costs.passes.seconds("full", 1, 1, 2048)


def test_lower_tier_is_predicted_by_its_work() -> None:
    """The retrieval tier has the weights of the full one, and fewer keys."""
    works = {name: TierWork(6, 1e7, 6e3) for name in ("full", "retrieval")}
    costs = CostModel(works=works)
    for _ in range(6):
        costs.passes.observe("full", 1, 1, 32_000, 10e-3)
        costs.passes.observe("full", 1, 1, 500, 1e-3)
    assert 0.5e-3 < costs.passes.seconds("retrieval", 1, 1, 2000) < 3e-3


def test_one_tier_alone_does_not_change_slowdown() -> None:
    """A draft that alone takes longer had wrong costs; the machine is as fast as before."""
    costs = learnt()
    for _ in range(20):
        costs.passes.observe("draft", 2, 1, 0, 1e-4)
    for _ in range(20):
        costs.passes.observe("draft", 2, 1, 0, 27e-4)
        costs.passes.observe("full", 2, 1, 8000, true(2, 8000))
    assert costs.passes.slowdown == 1.0
    assert costs.passes.seconds("draft", 2, 1, 0) == pytest.approx(27e-4, rel=0.2)


def test_many_kinds_of_passes_are_bounded() -> None:
    costs = CostModel()
    for keys in range(100, 200_000, 1000):
        for width in (1, 2, 3):
            costs.passes.observe("full", width, 1, keys, 1e-3)
    assert len(costs.passes.of("full").stats) == MAX_KINDS


def test_work_of_model_counts_bytes() -> None:
    work = TierWork.of(MODELS.target.config, 4, 4)
    assert work.weight_bytes == 4 * MODELS.target.config.weights_read and work.heads_per_kv_head == 2
    once = work.byte_times(1.0, 1, 1000.0, 8.0, 0.0, 8.0)
    assert work.byte_times(1.0, 1, 2000.0, 8.0, 0.0, 8.0) - once == pytest.approx(work.token_kv_bytes * 1000, rel=1e-3)


def test_work_of_int8_kv_counts_codes_and_scales() -> None:
    """The model's type does not matter. Tiers below the full one read half of each code."""
    config = replace(MODELS.target.config, kv_int8=True)
    heads = 2 * config.layers * config.kv_heads
    full, lower = (TierWork.of(config, 2, 4, reads_fewer_bits=below) for below in (False, True))
    assert full.token_kv_bytes == pytest.approx(heads * (config.head_dim + 2))
    assert full.bytes_per_element == 1 + 2 / config.head_dim
    assert lower.token_kv_bytes == pytest.approx(heads * (config.head_dim / 2 + 2))
    assert full.weight_bytes == lower.weight_bytes

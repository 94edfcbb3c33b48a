"""Costs learnt from passes: right for what was seen, sane for what was not, kept from run to run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from triforce.planner import CostModel, cost_model
from triforce.planner.acceptance import HISTORY_LIMIT
from triforce.planner.cost_model import costs_path
from triforce.planner.searched_layers import Finding, Trial, Verdicts


def true(tokens: int, keys: int) -> float:
    return 2e-3 + 1e-4 * tokens + 2e-7 * keys + 1e-8 * tokens * keys


def learnt(path: Path | None = None) -> CostModel:
    """From noisy passes of several widths and contexts."""
    dice, costs = random.Random(1), CostModel(path)
    for _ in range(400):
        tokens, keys = dice.choice((1, 2, 5, 9)), dice.choice((1000, 8000, 30_000))
        costs.observe("full", tokens, 1, keys, true(tokens, keys) * dice.uniform(0.9, 1.1))
    return costs


@pytest.mark.parametrize("tokens", [1, 8, 17])
@pytest.mark.parametrize("keys", [1000, 20_000, 60_000])
def test_costs_predict_pass_seconds(tokens: int, keys: int) -> None:
    assert learnt().seconds("full", tokens, 1, keys) == pytest.approx(true(tokens, keys), rel=0.15)


def test_costs_follow_slower_machine() -> None:
    costs = learnt()
    costs.observe("full", 1, 1, 8000, 1.0)  # a hiccup
    assert costs.seconds("full", 1, 1, 8000) < 1.5 * true(1, 8000)
    for _ in range(600):
        costs.observe("full", 1, 1, 8000, 4 * true(1, 8000))
    assert costs.seconds("full", 1, 1, 8000) == pytest.approx(4 * true(1, 8000), rel=0.3)


def slope_after_long(costs: CostModel) -> float:
    """What a token more is said to cost, of what it does, after passes of one width that were now and then hindered."""
    dice = random.Random(2)
    for i in range(1500):
        width, hindered = 1 if i % 40 == 0 else 3, 1.0 if i % 40 == 0 else dice.uniform(1.0, 1.5)
        costs.observe("full", width, 1, 30_000, hindered * true(width, 30_000))
    more = costs.seconds("full", 9, 1, 30_000) - costs.seconds("full", 1, 1, 30_000)
    return more / (true(9, 30_000) - true(1, 30_000))


def test_costs_of_width_survive_equal_passes() -> None:
    settled = learnt()
    settled.settle()
    assert 0.5 < slope_after_long(settled) < 2 < 3 < slope_after_long(learnt())


def test_costs_follow_slower_machine_after_profile() -> None:
    costs = learnt()
    costs.settle()
    for _ in range(600):
        costs.observe("full", 3, 1, 8000, 1.5 * true(3, 8000))
    assert costs.seconds("full", 3, 1, 8000) == pytest.approx(1.5 * true(3, 8000), rel=0.1)


def test_costs_of_unvaried_width_are_bounded() -> None:
    costs = CostModel()
    for _ in range(20):
        costs.observe("draft", 1, 1, 0, 1e-4)
    assert costs.seconds("draft", 1, 1, 0) == pytest.approx(1e-4)
    assert 1e-4 <= costs.seconds("draft", 4, 1, 0) <= 4.1e-4
    assert costs.knows("draft") and not costs.knows("draft", "full") and costs.seconds("full", 1, 1, 1) < 1e-5


def test_acceptance_is_stored_and_bounded(tmp_path: Path) -> None:
    costs = CostModel(tmp_path / "costs.json")
    for _ in range(1000):
        costs.acceptance.add("draft 0 0", 3, 1)
    assert sum(costs.acceptance.sums["draft 0 0"]) <= HISTORY_LIMIT
    costs.save()
    assert CostModel(costs.path).acceptance.of("draft", "draft 0 0") == costs.acceptance.of("draft", "draft 0 0") > 0.73


def test_costs_are_stored_and_restored(tmp_path: Path) -> None:
    path = tmp_path / "new" / "costs.json"
    costs = learnt(path)
    costs.save()
    assert CostModel(path).seconds("full", 3, 1, 9000) == pytest.approx(costs.seconds("full", 3, 1, 9000), rel=1e-3)
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]


def test_layer_costs_are_stored_and_restored(tmp_path: Path) -> None:
    costs = CostModel(tmp_path / "costs.json")
    costs.layers |= {"15": Finding([1], [2]), "16": Finding(trial=Trial(3, Verdicts(4, 5), Verdicts(6)))}
    costs.save()
    assert CostModel(costs.path).layers == costs.layers


def busy(costs: CostModel, times: float, tiers: tuple[str, ...], passes: int = 100) -> None:
    """Passes that take so many times what they do on a quiet machine."""
    dice = random.Random(3)
    for _ in range(passes):
        for tier in tiers:
            width = dice.choice((1, 3, 7))
            costs.observe(tier, width, 1, 8000, times * true(width, 8000) * dice.uniform(0.95, 1.05))


@pytest.mark.parametrize("times", [0.4, 3.0])
def test_costs_from_busy_machine_are_corrected(times: float, tmp_path: Path) -> None:
    costs = CostModel(tmp_path / "costs.json")
    busy(costs, times, ("full", "retrieval"))
    costs.settle()
    costs.save()
    later = CostModel(costs.path)
    assert later.seconds("retrieval", 3, 1, 8000) == pytest.approx(times * true(3, 8000), rel=0.2)
    busy(later, 1.0, ("full",), passes=70)
    for tier in ("full", "retrieval"):  # of which the second was not in use since
        assert later.seconds(tier, 3, 1, 8000) == pytest.approx(true(3, 8000), rel=0.2)


def test_costs_of_new_contexts_keep_machine_speed() -> None:
    """Longer contexts than before may cost anything: what they cost is no reason to think the machine slower."""
    costs = CostModel()
    for _ in range(100):
        costs.observe("full", 1, 1, 500, 1e-3)
        costs.observe("retrieval", 1, 1, 500, 1e-3)
    for _ in range(100):
        costs.observe("full", 1, 1, 32_000, 20e-3)
    assert costs.seconds("retrieval", 1, 1, 500) == pytest.approx(1e-3, rel=0.1)
    assert costs.seconds("full", 1, 1, 32_000) == pytest.approx(20e-3, rel=0.3)


UNFIT = f'{{"passes": {{"full": [{[[1, 0, 0, 0]] * 4}, [1, 1, 1, NaN], 9]}}, "shares": {{}}}}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"full": 3}',
        '{"passes": {"full": [[1], [2], "x"]}, "shares": {}}',
        '{"passes": {}, "shares": {"draft": [1, -1]}}',
        '{"passes": {}, "shares": {"draft": 1}}',
        UNFIT,
        '{"passes": {}, "shares": {}, "layers": {"15": {"layers": ["1"], "no_gain": [], "trial": null}}}',
        '{"passes": {}, "shares": {}, "layers": {"15": {"layers": [], "no_gain": [-1], "trial": null}}}',
        '{"passes": {}, "shares": {}, "layers": {"15": {"layers": [], "no_gain": [], "trial": {"layer": 1}}}}',
    ],
    ids=range(12),
)
def test_corrupt_cost_file_is_replaced(text: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    costs = CostModel(path)
    assert not costs.layers
    costs.observe("full", 1, 1, 1, 1.0)
    assert costs.seconds("full", 1, 1, 1) == pytest.approx(1.0)


def path_of(*models: str, dtype: torch.dtype = torch.bfloat16) -> Path | None:
    return costs_path([*models], torch.device("cpu"), dtype)


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
    before = path_of("a")
    assert "-bfloat16-" in str(before) and "-float32-" in str(path_of("a", dtype=torch.float32))
    monkeypatch.setattr(cost_model, "version", lambda name: "another")
    other = path_of("a")
    assert other != before
    monkeypatch.setattr(cost_model.native_loader, "native", None)
    assert path_of("a") not in (before, other) and "-torch-" in str(path_of("a"))


def test_unwritable_cost_folder_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    learnt(tmp_path / "file" / "costs.json").save()


def test_equal_passes_count_with_their_number() -> None:
    together, apart = learnt(), learnt()
    together.observe("full", 2, 1, 8000, 3e-3, passes=30)
    for _ in range(30):
        apart.observe("full", 2, 1, 8000, 3e-3)
    assert together.seconds("full", 2, 1, 8000) == pytest.approx(apart.seconds("full", 2, 1, 8000), rel=1e-3)


def test_long_plain_decoding_keeps_wide_pass_costs() -> None:
    """In a long context after a short one: what a token more costs is not to be told from what a key costs."""
    dice, costs = random.Random(3), CostModel()

    def see(tokens: int, keys: int) -> None:
        costs.observe("full", tokens, 1, keys, true(tokens, keys) * dice.uniform(0.8, 1.3))

    for width in (1, 1, 5, 5, 3):
        see(width, 500)
    costs.settle()
    for i in range(4000):
        see(1, 30_000 + i)
    assert costs.seconds("full", 7, 1, 32_000) < 1.5 * true(7, 32_000)
    for _ in range(8):
        see(7, 32_000)
    for i in range(4000):
        see(1, 30_000 + i)
    assert costs.seconds("full", 7, 1, 32_000) == pytest.approx(true(7, 32_000), rel=0.25)

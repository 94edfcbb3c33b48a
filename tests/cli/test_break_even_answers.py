"""Break-even of a model on a machine: `info` reads it from the file that a run of the model left, without weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.planner.test_cost_model import learnt
from triforce.bench.roofline import Roofline
from triforce.checkpoint.weight_files import stamp
from triforce.cli import main
from triforce.cli.machine_rates import require_balances
from triforce.llm import LLM
from triforce.planner import break_even
from triforce.planner.planner_config import AMONG_MODELS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of profiles of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "triforce"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["info", *arguments]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("speculation")]
    return line.split(maxsplit=1)[1]


@pytest.mark.parametrize("settings", [{}, {"lower_tiers": "int8"}, {"kv_dtype": "int8"}])
def test_info_and_model_tell_one_break_even(
    settings: dict[str, str], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the shipped pair, before and after its passes taught something; with a draft that `info` finds itself."""
    arguments = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    llm = LLM(device="cpu", **settings)  # type: ignore[arg-type]
    before = told(capsys, "--device", "cpu", *arguments)
    assert before == llm.break_even().verdict and "should pay from" in before
    taught = learnt(llm.engines.parts.costs.path)
    for width in (1, 2, 5, 9):
        taught.passes.observe(AMONG_MODELS, width, 1, 8000, 1e-3, 4)
    taught.save()
    after = told(capsys, "--device", "cpu", *arguments)
    assert after == llm.break_even().verdict != before and llm.break_even().learnt
    assert len(list(cache.glob("costs-*"))) == 1


def test_profiles_of_other_weights_and_settings_differ(tmp_path: Path, pair: Path) -> None:
    """Of the same folder; and one without weights has no stamp."""
    paths = {LLM(pair / "target", draft, device="cpu").engines.parts.costs.path for draft in (None, pair / "draft")}
    (file,) = (pair / "target").glob("*.safetensors")
    before, time = stamp(pair / "target"), file.stat().st_mtime_ns
    os.utime(file, ns=(time, time + 1))
    try:
        assert stamp(pair / "target") != before
        paths.add(LLM(pair / "target", None, device="cpu").engines.parts.costs.path)
    finally:
        os.utime(file, ns=(time, time))
    assert len(paths) == 3 and stamp(pair / "target") == before and not stamp(tmp_path)


def test_balance_that_was_kept_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each dtype is measured once, by the first caller."""
    turns: list[Roofline] = []
    here = Roofline(1e10, dict.fromkeys(("float32", "bfloat16", "int16", "int8"), 1e11))
    monkeypatch.setattr("triforce.cli.machine_rates.measured_roofline", lambda: turns.append(here) or here)
    require_balances()
    count = len(turns)
    require_balances()
    assert len(turns) == count > 0
    assert break_even.saved_balances() == dict.fromkeys(("float32", "bfloat16", "int16", "int8", "int8 KV"), 10.0)


@pytest.mark.parametrize("damage", ["", "[]", '{"bfloat16": "x"}', '{"bfloat16": -1}', '{"bfloat16": NaN}', "{"])
def test_corrupt_balance_file_is_as_good_as_none(damage: str, cache: Path) -> None:
    break_even.save_balances({"bfloat16": 12.0, "float32": 10.0})
    (file,) = cache.glob("balance-*")
    assert break_even.saved_balances() == json.loads(file.read_text())
    file.write_text(damage)
    assert not break_even.saved_balances()

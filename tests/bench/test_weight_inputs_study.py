"""The study of what int8 inputs cost and gain: both types are measured; mistakes are answered in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import weight_inputs
from tests.helpers.gguf_models import write_model
from triforce.backends import dispatch

pytestmark = pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")


def test_weight_inputs_measures_both_types(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_model(tmp_path, "Q4_0").gguf
    out = tmp_path / "weight_inputs.json"
    assert weight_inputs.main([str(file), "--texts", str(texts), "--quiet", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    figures = row["inputs"]["kinds"]["prose"]
    assert 0 < figures["int16"]["kl"] < figures["int8"]["kl"] < 1
    assert all(rate > 0 for rate in row["tokens_per_second"].values())
    assert "Inputs of products" in capsys.readouterr().out


def test_weight_inputs_mistakes_exit_2(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path, "F16")
    assert weight_inputs.main([str(model.gguf), "--windows", "0"]) == 2
    assert "--windows" in capsys.readouterr().err
    assert weight_inputs.main([str(model.gguf), "--texts", str(texts), "--quiet"]) == 2
    assert "packed weights" in capsys.readouterr().err

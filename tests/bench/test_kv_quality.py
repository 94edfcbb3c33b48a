"""The study of what int8 KV costs: each kind of KV is measured, and is another; mistakes are answered in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import kv_quality
from tests.helpers.gguf_models import write_model
from triforce.backends import dispatch

pytestmark = pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "Q4_0").gguf


def test_kv_quality_measures_each_kind_of_kv(
    file: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kv_quality.json"
    sizes = ["--max-context", "300", "--windows", "1", "--quiet", "--json", str(out)]
    assert kv_quality.main([str(file), "--texts", str(texts), *sizes]) == 0
    rows = {row["kv"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == list(kv_quality.KINDS)
    bits = {name: row["bits"]["kinds"]["prose"]["target"] for name, row in rows.items()}
    assert len(set(bits.values())) == len(bits), "no kind is another by mistake"
    assert all(abs(kind_bits / bits["bfloat16"] - 1) < 0.1 for kind_bits in bits.values())
    shown = capsys.readouterr().out
    assert "Loss by position" in shown and all(name in shown for name in rows)


@pytest.mark.parametrize("option", [["--max-context", "100"], ["--windows", "0"]])
def test_kv_quality_mistakes_exit_2(file: Path, option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert kv_quality.main([str(file), *option]) == 2
    assert option[0] in capsys.readouterr().err

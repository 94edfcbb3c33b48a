"""The study of precisions: float32 is itself, others stray from it, and mistakes are answered in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import perplexity
from benchmarks.perplexity import EXACT, losses, precisions
from tests.helpers.gguf_models import write_model
from tests.helpers.tiny_llm import ids
from triforce.backends import dispatch
from triforce.eval.scoring import full_view, nats
from triforce.llm import LLM

pytestmark = pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "Q4_0").gguf


def test_perplexity_tells_each_text_and_all(
    file: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "perplexity.json"
    sizes = ["--length", "200", "--windows", "2", "--json", str(out)]
    assert perplexity.main([str(file), "--texts", str(texts), *sizes]) == 0
    rows = {row["text"]: row for row in json.loads(out.read_text())["rows"]}
    assert {name: row["tokens"] for name, row in rows.items()} == {"book.txt": 398, "project.py": 398, "all": 796}
    for row in rows.values():
        assert row["perplexity"] > 10
        for name in ("default", "bfloat16"):
            assert 0 < row[name]["divergence"] < 0.1 and row[name]["half"] > 0
    assert "project.py" in capsys.readouterr().out


def test_losses_equal_those_of_one_decoder(file: Path) -> None:
    decoders = precisions(LLM(file, None))
    text = torch.tensor(ids(300))
    measured_losses = losses(decoders, text)
    assert measured_losses[EXACT][1].abs().max() < 1e-6
    for name, decoder in decoders.items():
        assert torch.allclose(measured_losses[name][0], nats(decoder, full_view(decoder, 300), text), atol=1e-4)


@pytest.mark.parametrize("option", [["--length", "128"], ["--windows", "0"]])
def test_perplexity_mistakes_exit_2(file: Path, option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert perplexity.main([str(file), *option]) == 2
    assert option[0] in capsys.readouterr().err

"""Where Ray is not installed."""

from __future__ import annotations

import pickle
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from triforce.cli import main
from triforce.errors import RequestError
from triforce.interface.grammar import Grammar
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.replicas.frontend import ReplicaFrontend


@pytest.mark.parametrize("arguments", [["--replicas", "2"], ["--ray-address", "auto"]])
def test_missing_ray_error_names_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    for name in [name for name in sys.modules if name == "ray" or name.startswith(("ray.", "triforce.replicas."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("triforce.replicas.ray_env.prepare", lambda address: None)
    assert main(["serve", "--port", "0", *arguments]) == 2
    assert "pip install 'triforce[ray]'" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: test_ray_*.py are not even read")
def test_ray_extra_names_ray() -> None:
    """The oldest one that was tried: in it the server of a replica (see `_keep_to_loopback`) asks for Ray's token."""
    assert tuple(map(int, version("ray").split(".")[:2])) >= (2, 60)


def test_frontend_parses_like_model(llm: LLM) -> None:
    """After a journey, and without weights: it is small however long a text its model has seen."""
    llm.generate("the cat", SamplingParams(max_tokens=2))
    sent = pickle.dumps(ReplicaFrontend.of(llm))
    frontend: ReplicaFrontend = pickle.loads(sent)
    assert len(sent) < 1 << 17 and frontend.modes == llm.modes and frontend.break_even() == llm.break_even()
    assert frontend.encode("naïve café — 東京 🙂") == llm.encode("naïve café — 東京 🙂")
    turns = [{"role": "user", "content": "a"}]
    assert llm.tokenizer and frontend.tokenizer.chat(turns) == llm.tokenizer.chat(turns)
    with pytest.raises(RequestError, match="context of 2048"):
        frontend.encode([5] * 2048)
    with pytest.raises(RequestError):
        frontend.grammars.compile(Grammar.json({"type": "no such type"})).follow()

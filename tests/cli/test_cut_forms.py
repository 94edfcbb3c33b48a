"""Texts that end before they are all that their form asks for: told, also with --quiet."""

from __future__ import annotations

import pytest

from tests.helpers.fake_llm import FakeLLM, NoGrammars
from triforce.cli import main

SCHEMA = '{"type": "object"}'


@pytest.mark.parametrize(
    ("form", "what"),
    [
        (["--json-schema", SCHEMA], "JSON"),
        (["--regex", "h.*o!"], "text of --regex"),
        (["--choice", "no", "--choice", "héllo!"], "text of --choice"),
    ],
)
def test_cut_form_is_told(
    form: list[str], what: str, llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "a prompt", "--quiet", *form, "--max-tokens", "5"]) == 0
    assert capsys.readouterr().err == f"the {what} is cut at --max-tokens 5; give more\n"
    monkeypatch.setattr(NoGrammars, "accepts", lambda *_: True)
    assert main(["generate", "a prompt", "--quiet", *form, "--max-tokens", "5"]) == 0
    assert capsys.readouterr().err == "", "a text that is all that the grammar describes may be as long as it may"


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_cut_json_is_told(quiet: list[str], llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    """The answer of this engine ends for its length; a text without a grammar may end anywhere."""
    assert main(["generate", "a prompt", *quiet, "--json-schema", SCHEMA, "--max-tokens", "5"]) == 0
    out, err = capsys.readouterr()
    assert out == "h\u00e9llo\n" and err.startswith("the JSON is cut at --max-tokens 5; give more\n")
    assert main(["generate", "a prompt", *quiet, "--json-schema", SCHEMA, "--max-tokens", "6"]) == 0
    assert "the JSON is cut, as the context is full" in capsys.readouterr().err
    assert main(["generate", "a prompt", *quiet, "--max-tokens", "5"]) == 0
    assert "cut" not in capsys.readouterr().err

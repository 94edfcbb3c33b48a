"""`triforce generate` as a user meets it: streams, JSON, colours."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_llm import Characters, FakeLLM, Piece, answer
from tests.helpers.tty import Tty
from triforce.cli import main
from triforce.cli.answer_output import Painter, report, split
from triforce.cli.progress import Prefill
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams

JSON_KEYS = [
    "text",
    "token_ids",
    "finish_reason",
    "mode",
    "coupling",
    "exactness",
    "ranks",
    "seed",
    "prompt_tokens",
    "cached_tokens",
    "reread",
    "completion_tokens",
    "prefill_seconds",
    "decode_seconds",
    "tokens_per_second",
    "tiers",
    "plans",
    "kv",
    "kv_dtype",
    "weight_inputs",
]


def test_generate_text_on_stdout_and_stats_on_stderr(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a prompt", "--temperature", "0", "--stop-token-id", "3", "--logit-bias", "5=-1"]) == 0
    out, err = capsys.readouterr()
    assert out == "héllo\n"
    assert "10.0 tokens/s" in err
    assert "75%" in err
    assert "full passes per new token: 0.40" in err
    assert (llm.made["model"], llm.called["prompt"]) == (None, "a prompt")
    params = llm.called["params"]
    assert (params.temperature, params.stop_token_ids, params.logit_bias) == (0.0, (3,), {5: -1.0})


def test_generate_chat_model_applies_template_on_request(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "Who is it?"]) == 0 and "--chat" not in capsys.readouterr().err
    monkeypatch.setattr(Characters, "chats", True)
    assert main(["generate", "Who is it?"]) == 0 and "has a chat template: with --chat" in capsys.readouterr().err
    assert main(["generate", "M", "Who is it?", "--chat"]) == 0 and "--chat" not in capsys.readouterr().err
    assert llm.called["prompt"] == "user: Who is it?"


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_generate_tells_of_a_stdin_that_is_not_read(
    llm: type[FakeLLM], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it has data, and nothing waits for some."""
    (tmp_path / "prompt").write_text("a prompt")
    message = "stdin is not read, as {} is given; without it stdin is the prompt\n"

    def said(data: bytes, *line: str) -> str:
        if kind == "pipe":
            reading, writing = os.pipe()
            os.write(writing, data)
        else:
            (tmp_path / "stdin").write_bytes(data)
            reading = os.open(tmp_path / "stdin", os.O_RDONLY)
            writing = os.open(os.devnull, os.O_WRONLY)
        with open(reading, encoding="utf-8") as source, open(writing, "wb"):
            monkeypatch.setattr(sys, "stdin", source)
            assert main(["generate", *line]) == 0 and llm.called["prompt"]
            return capsys.readouterr().err

    assert said(b"text", "a prompt").startswith(message.format("a PROMPT"))
    assert said(b"text", "org/model", "--prompt-file", str(tmp_path / "prompt")).startswith(
        message.format("--prompt-file")
    )
    assert said(b"text", "a prompt", "-q") == "" and "not read" not in said(b"", "a prompt")


@pytest.mark.parametrize("device", ["/dev/null", "/dev/ptmx"])
@pytest.mark.usefixtures("llm")
def test_generate_tells_of_no_device_as_stdin(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(device, "rb", buffering=0) as source:
        monkeypatch.setattr(sys, "stdin", source)
        assert main(["generate", "a prompt"]) == 0
    assert "not read" not in capsys.readouterr().err


def test_generate_word_is_prompt_where_nothing_is_piped(
    llm: type[FakeLLM], stdin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A word may be a prompt or a model; with a text on stdin it is the model."""
    stdin(b"")
    assert main(["generate", "word"]) == 0 and "'word' is taken for the PROMPT" in capsys.readouterr().err
    assert (llm.made["model"], llm.called["prompt"]) == (None, "word")
    stdin(b"a text")
    assert main(["generate", "word"]) == 0 and "taken" not in capsys.readouterr().err
    assert (llm.made["model"], llm.called["prompt"]) == ("word", "a text")


USUAL = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
NONE = "defaults are the usual ones, as the model's files name none"
CHAT_ADVICE: list[tuple[dict[str, float], str, SamplingParams, str]] = [
    ({}, "--chat", USUAL, f"sampling: temperature 0.8, top_k 40, top_p 0.95, min_p 0.05; {NONE}"),
    ({}, "--chat --top-k 5", replace(USUAL, top_k=5), f"top_k 5, top_p 0.95, min_p 0.05; {NONE}"),
    ({}, "--chat --temperature 0", replace(USUAL, temperature=0.0), "sampling: greedy\n"),
    (
        {"top_p": 0.9},
        "--chat",
        SamplingParams(top_p=0.9),
        "temperature 1, top_p 0.9; defaults are those of the model's",
    ),
    ({}, "--chat --quiet", USUAL, ""),
    ({}, "", SamplingParams(), ""),
]


@pytest.mark.parametrize(("named", "options", "expected", "message"), CHAT_ADVICE)
def test_generate_chat_has_usual_sampling_where_files_name_none(
    named: dict[str, float],
    options: str,
    expected: SamplingParams,
    message: str,
    llm: type[FakeLLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A terminal shows the sampling."""
    monkeypatch.setattr(sys, "stderr", tty := Tty())
    monkeypatch.setattr(llm, "sampling_defaults", named)
    monkeypatch.setattr(Characters, "chats", True)
    assert main(["generate", "M", "-p", "Who is it?", *options.split()]) == 0
    assert llm.called["params"] == expected
    assert message in tty.getvalue() and ("sampling: " in tty.getvalue()) == bool(message)


def test_generate_arguments_reach_engine(llm: type[FakeLLM]) -> None:
    engine = "--mode retrieval --draft none --retrieval-budget 3% --retrieval-refresh auto"
    engine += " --speculative-tokens 4 --context 99 --dtype float32"
    assert main(["generate", "org/model", "word", *engine.split(), "--save-cache", "kv"]) == 0
    expected = {
        "model": "org/model",
        "draft": None,
        "mode": "retrieval",
        "retrieval_budget": "3%",
        "retrieval_refresh": "auto",
        "context": 99,
    }
    assert {name: llm.made[name] for name in expected} == expected
    assert (llm.called["prompt"], llm.called["save_cache"], llm.called["load_cache"]) == ("word", "kv", None)


def test_generate_reads_prompt_file_and_stdin(llm: type[FakeLLM], stdin: Any, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes("línes\r\n\n".encode())
    assert main(["generate", "--prompt-file", str(tmp_path / "prompt")]) == 0
    assert llm.called["prompt"] == "línes\r\n", "only the end of the last line is dropped"
    stdin(b"from a pipe\n")
    assert main(["generate"]) == 0
    assert llm.called["prompt"] == "from a pipe"


@pytest.mark.usefixtures("llm")
def test_generate_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a prompt", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert list(result) == JSON_KEYS
    assert result["tiers"][0] == {"name": "draft", "proposed": 4, "accepted": 3, "passes": 2, "seconds": 0.1}
    assert not err


@pytest.mark.usefixtures("llm")
def test_generate_json_of_several_has_logprobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a prompt", "--json", "--n", "2", "--logprobs", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == [*JSON_KEYS, "choices", "logprobs"]
    assert [choice["index"] for choice in result["choices"]] == [0, 1]
    assert result["completion_tokens"] == 10
    assert result["logprobs"] == [
        {"token_id": 1, "logprob": -0.5, "text": "h", "top": [{"token_id": 2, "logprob": None, "text": "j"}]}
    ]


@pytest.mark.usefixtures("llm")
def test_generate_several_texts_are_printed_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a prompt", "--n", "2"]) == 0
    assert capsys.readouterr().out == "[1 of 2]\nhéllo\n[2 of 2]\nhéllo\n"


@pytest.mark.usefixtures("llm")
def test_generate_colours_by_tier(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a prompt", "--color"]) == 0
    out, err = capsys.readouterr()
    assert (
        out
        == "".join(f"\033[{color}m{text}\033[0m" for text, color in [("h", 32), ("é", 31), ("ll", 32), ("o", 31)])
        + "\n"
    )
    assert "proposed by: \033[32mdraft\033[0m \033[31mfull\033[0m" in err


def test_generate_colours_follow_held_back_text() -> None:
    painter = Painter(Characters(), [])  # type: ignore[arg-type]
    first_piece = Piece("ab", ["draft", "full"])
    second = Piece("cd", ["draft", "full"])
    first_piece.text = "a"
    second.text = "bcd."
    painted = painter(first_piece) + painter(second)  # type: ignore[arg-type]
    assert painted == "".join(
        f"\033[{color}m{text}\033[0m" for text, color in [("a", 32), ("b", 31), ("c", 32), ("d.", 31)]
    )


def test_generate_stats_of_several_continuations() -> None:
    assert "draft              8         6    75%       4     0.10" in report(answer("héllo", n=2))


def test_generate_tells_where_its_seconds_went(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    """The answer's own seconds stand beside those of the start."""
    assert main(["generate", "-p", "a"]) == 0
    assert ", weights 1.25, prompt " in capsys.readouterr().err
    assert split(2.0, 1.5, answer("a")).startswith("seconds: imports and engine 0.50, weights 1.50, prompt ")


def test_progress_without_terminal_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Prefill()
    bar(1, 2)
    bar(2, 2)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "coupling", "clocked"),
    [("auto", "rejection", True), ("auto", "seeded", False), ("ar", "rejection", False)],
)
def test_generate_reports_seed_that_depends_on_clock(mode: str, coupling: str, clocked: bool) -> None:
    output = answer("a")
    report_text = report(
        RequestOutput(output.prompt_token_ids, None, output.outputs, mode, coupling, "distribution", 1.0, 1.0)
    )
    assert ("the text of a seed depends on timing" in report_text) == clocked


SCHEMA = '{"type": "object"}'


def test_json_schema_is_file_or_argument(
    llm: type[FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schema.json"
    other_file = tmp_path / "other.txt"
    file.write_text(SCHEMA)
    other_file.write_text("hello")
    for schema in (SCHEMA, f" {SCHEMA}", str(file)):
        assert main(["generate", "a prompt", "--json-schema", schema]) == 0
        assert json.loads(llm.called["params"].grammar.source) == json.loads(SCHEMA)
    capsys.readouterr()
    for schema, named in ((str(other_file), str(other_file)), ("{", "the schema of --json-schema")):
        assert main(["generate", "a prompt", "--json-schema", schema]) == 2
        assert capsys.readouterr().err.startswith(f"triforce: error: {named} is not JSON (")

"""`triforce demo`: a small real model is asked about a part of a book, or the shipped pair continues it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_hub import ended, started
from tests.helpers.fake_llm import FakeLLM, Piece, answer
from tests.helpers.gguf_files import SMOLLM2
from tests.helpers.tty import Tty
from triforce.cli import main
from triforce.cli.demo import QUESTION, TASK, book_part
from triforce.interface.outputs import RequestOutput

ANSWER = "Demeter"
PAIR = "The pair that comes with triforce continues a text instead"
real = [
    pytest.mark.skipif(not SMOLLM2.exists(), reason="REAL MODEL NOT TESTED: `make smollm2` did not run"),
    pytest.mark.timeout(1200),
]


class Recorder(FakeLLM):
    """Remembers all that it was asked; what mode `auto` says may differ."""

    asked: list[tuple[str, str, Any]]
    fast = "héllo"

    def stream(self, prompt: list[int], params: Any, **settings: Any) -> Iterator[Piece | RequestOutput]:
        *pieces, _ = super().stream(prompt, params, **settings)
        self.asked.append((settings["mode"], self.called["prompt"], params))
        yield from pieces
        yield answer("héllo" if settings["mode"] == "ar" else self.fast)


@pytest.fixture
def model(llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    """Replace the model with a recorder; the pinned file does not exist."""
    fake = type("LLM", (Recorder,), {"asked": []})
    monkeypatch.setattr(sys.modules["triforce.llm"], "LLM", fake)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("TRIFORCE_SMOLLM2", raising=False)
    return fake


@pytest.fixture
def recorder(model: type[Recorder], monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    """The recorder, where the pinned file exists."""
    monkeypatch.setattr("triforce.cli.demo.find", lambda published: Path(published.file))
    return model


def test_demo_asks_real_model_in_two_modes(recorder: type[Recorder], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert recorder.made["model"] == SMOLLM2.name and [mode for mode, *_ in recorder.asked] == ["ar", "auto"] * 2
    prompts = [f"user: {book_part()}\n\n{text}" for text in (QUESTION, TASK)]
    assert [prompt for _, prompt, _ in recorder.asked] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert [(params.temperature, params.ignore_eos) for *_, params in recorder.asked] == [(0, False)] * 2 + [
        (0.8, False)
    ] * 2
    for message in ("A model of 135M parameters is often wrong", QUESTION, "10.0 tokens/s", "1.00 times as fast\n"):
        assert message in out
    assert "Speculation pays from 4,096 tokens on.\nIn all" in out
    assert out.count("texts       identical") == 2 and not err


@pytest.mark.parametrize(
    ("arguments", "name"), [([], "smollm2"), (["--prompt-tokens", "9"], "the pair that comes with triforce")]
)
def test_demo_says_what_is_loading(
    recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch, arguments: list[str], name: str
) -> None:
    monkeypatch.setattr(sys, "stderr", tty := Tty())
    assert main(["demo", *arguments]) == 0 and recorder.asked
    assert tty.getvalue().startswith(f"loading {name} ...\n")


def test_demo_texts_that_differ_are_code_one(recorder: type[Recorder], capsys: pytest.CaptureFixture[str]) -> None:
    recorder.fast = "hallo"
    assert main(["demo"]) == 1 and capsys.readouterr().out.count("NOT IDENTICAL") == 2


def test_demo_loop_is_told_beside_the_ratio(recorder: type[Recorder], capsys: pytest.CaptureFixture[str]) -> None:
    """The loop may be in either of the two texts."""
    recorder.fast = "the ship's name " * 8
    assert main(["demo"]) == 1
    message = "1.00 times as fast: the text repeats itself (87% of its 8-grams), so this ratio says little\n"
    assert capsys.readouterr().out.count(message) == 2


def test_demo_without_file_shows_pair(model: type[Recorder], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--offline"]) == 0
    out, err = capsys.readouterr()
    assert model.made["model"] is None and [mode for mode, *_ in model.asked] == ["ar", "triforce"] * 2
    assert [(len(prompt), params.ignore_eos) for _, prompt, params in model.asked] == [(16_384, True)] * 4
    assert "135M" not in out
    why, shown = err.splitlines()
    assert "smollm2 is not in" in why and "nothing is fetched offline" in why and shown.startswith(PAIR)


def test_demo_prompt_length_asks_for_pair(model: type[Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIFORCE_SMOLLM2", "nowhere")
    assert main(["demo", "--prompt-tokens", "50"]) == 0
    assert model.made["model"] is None and {len(prompt) for _, prompt, _ in model.asked} == {50}


def test_demo_mistake_is_refused_before_anything_is_fetched(
    model: type[Recorder], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("triforce.cli.demo.find", lambda _: pytest.fail("it was looked for"))
    assert main(["demo", "--max-tokens", "0"]) == 2 and not model.asked
    assert capsys.readouterr().err == "triforce: error: --max-tokens must be an integer, at least 1, not 0\n"


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("tokens", ["0", "1", "131072", "1000000000"])
def test_demo_prompt_length_is_refused_in_one_line(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--prompt-tokens", tokens]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"triforce: error: --prompt-tokens {tokens}: the book has 833,664 tokens, and the context 131,072; "
        "give 2 to 131071"
    ]


@pytest.mark.parametrize(("data", "why"), [(b"GGUF?", "it has sha256 "), (None, "No such file")])
def test_demo_wrong_file_is_refused(
    model: type[Recorder],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    data: bytes | None,
    why: str,
) -> None:
    if data:
        (tmp_path / "own.gguf").write_bytes(data)
    monkeypatch.setenv("TRIFORCE_SMOLLM2", str(tmp_path / "own.gguf"))
    assert main(["demo"]) == 2 and not model.asked
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"triforce: error: TRIFORCE_SMOLLM2={tmp_path}") and why in line


@pytest.mark.slow
def test_demo_out_of_reach_shows_pair(tmp_path: Path) -> None:
    """No hub and no index answers: what each source said, and texts of the shipped pair."""
    code, out, err = ended(
        started("from triforce.cli import main; exit(main(['demo', '--max-tokens', '4']))", tmp_path)
    )
    assert code == 0 and out.count("identical") == 2 and "the first 16,384 tokens" in out
    *fetching, why, shown = err.splitlines()
    assert [line.partition(" ")[0] for line in fetching] == ["fetching", "From"] * 2 and "98 MB" in fetching[0]
    assert why.startswith("smollm2 could not be fetched. From the Hugging Face hub (") and shown.startswith(PAIR)


def test_demo_part_has_answer_and_question_has_not() -> None:
    assert book_part().startswith("CUTTING FROM") and book_part().endswith('"mystery of the sea."')
    assert ANSWER in book_part() and ANSWER.lower() not in QUESTION.lower()


@pytest.mark.parametrize(
    ("file", "dtype"),
    [
        pytest.param(SMOLLM2, "auto", marks=real),
        pytest.param(SMOLLM2, "float32", marks=[*real, pytest.mark.slow]),
        pytest.param(SMOLLM2.parent, "bfloat16", marks=[*real, pytest.mark.slow]),
    ],
)
def test_demo_real_model_answers_rightly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: Path, dtype: str
) -> None:
    monkeypatch.setattr("triforce.cli.demo.find", lambda _: file)
    assert main(["demo", "--max-tokens", "20", "--dtype", dtype]) == 0
    asked = capsys.readouterr().out.partition(f"== {TASK}")[0]
    plain, fast = asked.partition("[ar]")[2].split("[auto]")
    assert ANSWER in plain and ANSWER in fast

"""The command line itself: short options, names that are nearly right, help, what is loading."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_llm import FakeLLM
from tests.helpers.tty import Tty
from triforce.checkpoint.gguf.file import log_choice
from triforce.checkpoint.hub import model_path
from triforce.cli import main
from triforce.cli.parser import parse
from triforce.cli.progress import Prefill, announce
from triforce.errors import ModelError


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("chatt", "'chatt' is not known (did you mean chat?); choose from generate,"),
        ("bench sped", "'sped' is not known (did you mean speed?)"),
        ("generate --mode tripforce", "argument --mode: 'tripforce' is not known (did you mean triforce?)"),
        (
            "generate a --temprature=3 b",
            "--temprature is not an option of triforce generate (did you mean --temperature",
        ),
        ("bench speed --repeat 3", "--repeat is not an option of triforce bench speed (did you mean --repeats?)"),
        ("--verion", "--verion is not an option of triforce (did you mean --version?)"),
        ("generate --zzz", "--zzz is not an option of triforce generate; see triforce generate --help"),
        ("generate --foo", "--foo is not an option of triforce generate; see triforce generate --help"),
        ("generate --port 9", "--port is not an option of triforce generate; it is an option of serve, launch; see"),
        ("generate a b c d", "too many arguments for triforce generate: c d; a PROMPT of"),
        (
            "generate -- hi -n 3 -q",
            "-n comes after --, which ends the options; put options before it; see",
        ),
        ("generate -q -- hi -n 3", "-n comes after --, which ends the options"),
        ("generate -q -- hi -n3 x", "-n3 comes after --"),
        ("chat -- a --seed=1 b", "--seed=1 comes after --"),
        ("generate -- a b -c", "too many arguments for triforce generate: -c"),
        ("generate --seed 1 -- a b c", "too many arguments for triforce generate: c"),
        ("chat a b", "too many arguments for triforce chat: b; see triforce chat --help"),
        ("serve --port abc", "argument --port: 'abc' is not a whole number; see"),
        ("generate x --temperature warm", "argument --temperature: 'warm' is not a number; see"),
        ("train-draft -o d --minutes 5m", "argument --minutes: '5m' is not a number of minutes; see"),
        ("bench speed --minutes half", "argument --minutes: 'half' is not a number of minutes; see"),
        (
            "models list --json",
            "--json is not an option of triforce models list; it is an option of generate, explain, "
            "bench speed, bench lossless, ",
        ),
        ("info --repeats 3", "--repeats is not an option of triforce info; it is an option of bench speed, "),
        ("generate -m a b c", "there are two models, 'b' and -m 'a'; leave one out"),
        ("generate -m a -p b c", "there are two prompts, 'c' and -p 'b'; leave one out"),
        ("chat -m a b", "there are two models"),
    ],
)
def test_parser_mistakes_are_one_helpful_line(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(line.split())
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.startswith("triforce: error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("argument", "model"),
    [
        ("a " * 300, False),
        ("a" * 300, False),
        ("\u4f60\u597d" * 100, False),
        ("Hello,", False),
        ("org/model", True),
        ("org/model:Q4_K_M", True),
        ("smollm2", True),
        ("./model", True),
        ("~/model", True),
        ("a.gguf", True),
        ("here", True),
        ("two words", True),
        ("other", None),
    ],
)
def test_parser_single_argument_is_model_by_its_shape(
    argument: str,
    model: bool | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A word that is both is the prompt on a terminal; piped text makes it the model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "two words").mkdir()
    for terminal in (True, False):
        monkeypatch.setattr(sys, "stdin", Tty() if terminal else io.StringIO())
        options = parse(["generate", argument])
        taken = not terminal if model is None else model
        assert (options.model, options.prompt) == ((argument, None) if taken else (None, argument))
        assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "model", "prompt"),
    [
        ("generate -m M -p P", "M", "P"),
        ("generate -m M P", "M", "P"),
        ("generate P -m M", "M", "P"),
        ("generate -p P M", "M", "P"),
        ("generate -m M --seed 1 P", "M", "P"),
        ("explain M -p P", "M", "P"),
        ("generate -p P", None, "P"),
    ],
)
def test_parser_accepts_model_and_prompt_by_name(line: str, model: str | None, prompt: str) -> None:
    options = parse(line.split())
    assert (options.model, options.prompt) == (model, prompt)


def test_parser_short_options_are_accepted() -> None:
    options = parse(["chat", "-m", "M", "-n", "5", "--temperature", "0.5", "-q"])
    assert (options.model, options.max_tokens, options.temperature, options.quiet) == ("M", 5, 0.5, True)


def test_parser_without_arguments_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    out, err = capsys.readouterr()
    assert end.value.code == 0 and out.startswith("usage: triforce") and not err


def test_parser_misspelt_folder_gets_suggestion(tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(ModelError, match=r"smolm2 \(did you mean .*/smollm2\?\); give"):
        model_path(str(tmp_path / "smolm2"))
    with pytest.raises(ModelError, match="another; give"):
        model_path(str(tmp_path / "another"))


@pytest.mark.usefixtures("llm")
def test_quiet_prints_text_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a prompt", "--quiet", "--color"]) == 0
    out, err = capsys.readouterr()
    assert "h" in out and not err


WORD = "'word' is taken for the PROMPT; for a model of that name: -m word\n"
PAIR = "loading the pair that comes with triforce ...\n"


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        ("generate some/model x", "loading some/model ...\n"),
        ("generate word", WORD + PAIR),
        ("explain word", WORD + PAIR),
        ("generate word -q", ""),
        ("generate some/model x -q", ""),
        ("generate some/model x --temperature -1", ""),
        ("generate word --chat", ""),
        ("generate some/model", ""),
        ("generate some/model --prompt-file no.such.file", ""),
        ("chat some/model --file no.such.file", ""),
        ("chat some/model", "loading some/model ...\n"),
        ("batch no.such.file", ""),
        ("serve some/model --max-connections 0", ""),
        ("serve some/model --tp 0", ""),
        ("watch no.such.folder --disk-cache cache", ""),
        ("generate some/model x --disk-cache cache --temperature -1", ""),
    ],
)
def test_loading_is_told_once_arguments_are_checked(
    line: str, notice: str, llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The notice appears on a terminal, before the model is loaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", Tty())
    monkeypatch.setattr(sys, "stderr", tty := Tty())
    notices: list[str] = []

    def load(self: FakeLLM, model: str | None, **settings: Any) -> None:
        notices.append(tty.getvalue())
        raise ModelError("that is enough")

    monkeypatch.setattr(llm, "__init__", load)
    assert main(line.split()) == 2
    shown, mistake = tty.getvalue().rsplit("triforce: error: ", 1)
    assert shown == notice and notices == ([notice] if "that is enough" in mistake else [])
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_choice_of_gguf_file_is_printed_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    for quiet, message in ((False, "taking a-Q4_0.gguf of 2 models in folder\n"), (True, "")):
        announce(Namespace(command="generate", model="folder", quiet=quiet))
        log_choice(["a-Q4_0.gguf"], ["a-Q4_0.gguf", "a-Q8_0.gguf"], "folder")
        assert capsys.readouterr() == ("", message)


def test_progress_bar_stays_until_first_text(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bar is on the terminal until the first piece comes."""
    monkeypatch.setattr(sys, "stderr", tty := Tty())
    with Prefill() as bar:
        bar(1, 2)
        bar(2, 2)
        assert "writing: 100%" in tty.getvalue().rpartition("\r")[2]
    assert not tty.getvalue().rpartition("\r")[2].strip()
    with Prefill(quiet=True) as bar:
        shown = tty.getvalue()
        bar(2, 2)
    assert tty.getvalue() == shown


@pytest.mark.parametrize(
    ("line", "expected_word"),
    [("triforce generate --mode tr", "triforce"), ("triforce ch", "chat"), ("triforce chat --sys", "--system")],
)
def test_shell_completion_lists_options(line: str, expected_word: str, tmp_path: Path) -> None:
    """Completions are requested as a shell does, and come through a file."""
    words_file = tmp_path / "found"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(words_file), "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    code = "import sys; from triforce.cli import main; sys.argv[0] = 'triforce'; main()"
    subprocess.run([sys.executable, "-c", code], env=os.environ | asked, check=True, capture_output=True)
    assert words_file.read_text().split() == [expected_word]

"""Messages about mistakes, bytes that are no text, and pipes that close."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_line import exit_code
from tests.helpers.extras import skip_without_torch
from tests.helpers.fake_llm import FakeLLM
from triforce.cli import main
from triforce.errors import ModelError

ROOT = Path(__file__).parents[2]

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src")}

MISTAKES = {
    "a file that is missing": (["--prompt-file", "no/such/file"], "cannot be read"),
    "two prompts": (["model", "a prompt", "--prompt-file", "-"], "leave one"),
    "an empty prompt": ([""], "empty"),
    "an empty prompt after a model": (["model", ""], "empty"),
    "an argument that is not UTF-8": (["a \udcff"], "UTF-8"),
    "a temperature below zero": (["a prompt", "--temperature", "-1"], "temperature"),
    "a known model without a prompt": (["smollm2"], "the prompt is empty; give at least one character\n"),
    "a text like a model": (["and/or"], "('and/or' was taken for the MODEL; as the prompt: -p and/or)\n"),
    "an empty name of a file": (["--prompt-file", ""], "empty name"),
}
OF_COMMANDS = {
    "a body without end": (["serve", "--max-body", "inf"], "--max-body inf"),
    "a wait that is no number": (["serve", "--shutdown-timeout", "nan"], "--shutdown-timeout nan"),
    "a timeout that is no number": (["serve", "--timeout", "nan"], "--timeout nan"),
    "a latency without end": (["serve", "--max-itl", "inf"], "--max-itl inf"),
    "a host that is no name": (["serve", "--host", f"{'a' * 64}.org", "--api-key-file", "KEYS"], "--host"),
    "a home of no user": (["info", "~no-user-of-that-name/model"], "no such home"),
    "requests without a name": (["batch", ""], "an empty name"),
    "a model before the requests": (["batch", "smollm2", "a/x.txt"], "FILE comes first, and MODEL behind it: "),
    "a file of a model before the requests": (["batch", "no.gguf", "a/x.txt"], "triforce batch a/x.txt no.gguf\n"),
    "a folder of requests": (["batch", "/"], "no file of requests"),
    "layers without end": (["generate", "--searched-layers", "0-9999999999", "--prompt", "x"], "--searched-layers"),
    "more candidates than tokens": (["generate", "--top-k", str(2**63), "--prompt", "x"], "--top-k"),
    "answers without a name": (["batch", "a/x.txt", "-o", ""], "an empty name"),
    "a folder to watch without a name": (["watch", "", "--disk-cache", "cache"], "an empty name"),
    "a disk cache without a name": (["generate", "x", "--disk-cache", ""], "an empty name"),
    "a cache to list without a name": (["cache", "list", ""], "an empty name"),
    "a disk cache with a NUL": (["serve", "--disk-cache", "a\0b"], "no folder"),
    "a disk cache where all is": (["generate", "x", "--disk-cache", "/"], "/ "),
    "a disk cache in no folder": (["serve", "--disk-cache", "no/cache"], "no/cache cannot be a disk cache"),
    "a disk cache without end": (["serve", "--disk-cache", "c", "--disk-cache-size", "9" * 400], "--disk-cache-size"),
    "a disk cache beyond disks": (["serve", "--disk-cache", "c", "--disk-cache-size", "9e9TiB"], "--disk-cache-size"),
    "memory without end": (
        ["generate", "--prompt", "x", "--kv-offload", "host", "--kv-memory", f"{'9' * 400}GiB"],
        "--kv-memory",
    ),
    "a saved prompt without a name": (["generate", "x", "--save-cache", ""], "an empty name"),
    "figures without a name": (["doctor", "--out", ""], "an empty name"),
    "minutes without end": (["bench", "speed", "--minutes", "1e308"], "(a year) at most"),
    "minutes that are no number": (["bench", "speed", "--minutes", "nan"], "(a year) at most"),
    "a model's name of 300 letters": (["info", "a" * 300], "is too long for a name"),
    "a draft's name of 300 letters": (["generate", "--draft", "a" * 300, "-p", "x"], "is too long for a name"),
    "texts of one name": (["eval", "--texts", "a/x.txt", "b/x.txt"], "the same file name"),
}


@pytest.mark.parametrize("mistake", OF_COMMANDS)
def test_mistakes_of_commands_exit_2_with_one_message(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_without_torch(OF_COMMANDS[mistake][0][0])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "KEYS").write_text("a-key-of-many-characters\n")
    (tmp_path / "KEYS").chmod(0o600)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text("a text")
    arguments, message = OF_COMMANDS[mistake]
    assert exit_code(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("triforce: error: ") and message in err and err.count("\n") == 1 and len(err) < 400
    assert sorted(path.name for path in tmp_path.iterdir()) == ["KEYS", "a", "b"], "nothing is written"


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.usefixtures("llm")
def test_cli_mistakes_exit_2_with_one_message(mistake: str, stdin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stdin(b"")
    arguments, message = MISTAKES[mistake]
    assert exit_code(["generate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("triforce: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("llm")
def test_folder_without_text_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt-file", str(tmp_path)]) == 2
    assert f"there is no text in {tmp_path}" in capsys.readouterr().err


@pytest.mark.usefixtures("llm")
def test_stdin_not_utf8_is_reported(stdin: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert main(["generate", "--prompt-file", str(tmp_path / "latin")]) == 2
    assert "byte 0xe9 at offset 3" in capsys.readouterr().err
    stdin(b"\xff")
    assert main(["generate"]) == 2
    assert "stdin is not UTF-8" in capsys.readouterr().err
    stdin(b"")
    assert main(["generate"]) == 2
    assert "empty" in capsys.readouterr().err


def test_engine_errors_exit_with_message(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    llm.fault = ModelError("no such model")
    assert main(["generate", "a prompt"]) == 2
    assert capsys.readouterr().err == "triforce: error: no such model\n"
    llm.fault = KeyboardInterrupt()  # type: ignore[assignment]
    assert main(["generate", "a prompt"]) == 130


def test_missing_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "no/such/folder"]) == 2
    assert "no/such/folder" in capsys.readouterr().err


def test_closed_pipe_is_quiet() -> None:
    code = (
        "import sys, types; from triforce import cli\n"
        "module = types.ModuleType('triforce.cli.info'); sys.modules['triforce.cli.info'] = module\n"
        "def run(options):\n    [print('x' * 1000) for _ in range(1000)]; return 0\n"
        "module.run = run\nsys.exit(cli.main(['info']))"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141

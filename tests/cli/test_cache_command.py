"""`triforce cache` and the options of the disk cache, as users meet them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.fake_llm import FakeLLM
from triforce.cli import main

PROMPT = "It was the best of times, it was the worst of times. " * 25


@pytest.fixture(scope="module")
def cache(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A disk cache with a prompt."""
    path = tmp_path_factory.mktemp("kept") / "cache"
    assert generate(pair, path) == 0
    return path


def generate(pair: Path, cache: Path, *extra_options: str) -> int:
    command = ["generate", "-m", str(pair / "target"), "--draft", str(pair / "draft"), "-p", PROMPT, "-n", "2"]
    return main([*command, "--disk-cache", str(cache), *extra_options])


def test_second_process_starts_from_disk_and_says_so(
    cache: Path, pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(pair, cache, "--json", "--disk-cache-size", "1GiB") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["cached_tokens"] >= 512 and json.loads(printed.out)["reread"] == ""
    assert f"prompts and answers from 512 tokens on are kept in {cache}, up to 1GiB" in printed.err


def test_cache_list_shows_models_and_prompts_without_text(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "list", str(cache)]) == 0
    head, prompt, other_line = capsys.readouterr().out.splitlines()
    assert head.startswith("target (") and "1 prompt, " in head
    assert prompt.endswith(" tokens") and "1 entry of token ids" in other_line


def test_cache_verify_removes_what_is_damaged(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(pair, tmp_path / "cache") == 0
    assert main(["cache", "verify", str(tmp_path / "cache")]) == 0
    file = next((tmp_path / "cache").glob("*.kv"))
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["cache", "verify", str(tmp_path / "cache")]) == 1
    printed = capsys.readouterr()
    assert "1 of them was damaged" in printed.out and file.name in printed.err and not file.exists()
    assert main(["cache", "verify", str(tmp_path / "cache")]) == 0
    assert main(["cache", "clear", str(tmp_path / "cache")]) == 0
    assert not list((tmp_path / "cache").glob("*.kv"))
    assert main(["cache", "list", str(tmp_path / "cache")]) == 0
    assert "nothing is kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--disk-cache-size", "1GiB"], "--disk-cache"),
        (["--disk-cache-network"], "--disk-cache"),
        (["--disk-cache", "HERE", "--tp", "2"], "--tp"),
    ],
)
def test_disk_cache_mistakes_are_one_line(
    llm: type[FakeLLM], tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli_arguments = [str(tmp_path / "cache") if argument == "HERE" else argument for argument in arguments]
    assert main(["generate", "-p", "x", "-q", *cli_arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("prompts and answers")]
    assert len(lines) == 1 and lines[0].startswith("triforce: error: ") and message in lines[0]


@pytest.mark.parametrize("size", ["much", "-1", "auto"])
def test_disk_cache_size_must_be_one(pair: Path, tmp_path: Path, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(pair, tmp_path / "cache", f"--disk-cache-size={size}") == 2
    assert "--disk-cache-size" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["list", "verify", "clear"])
def test_cache_command_refuses_other_folders(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "letter.kv").write_text("dear")
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert main(["cache", what, str(folder)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert (tmp_path / "letter.kv").exists()


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "batch"])
def test_help_says_that_prompts_are_kept(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "KV of prompts and answers is kept on disk" in " ".join(capsys.readouterr().out.split())

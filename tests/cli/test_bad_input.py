"""Mistakes of a user, through the real command: exit code 2, one clear message, no traceback, nothing lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.tiny_checkpoint import save, tiny_model, tiny_tokenizer
from triforce.cli import main

Spoil = Callable[[Path], list[str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good target and draft with a tokenizer, and a draft with another vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    for name, tokens in (("target", 300), ("draft", 300), ("stranger", 290)):
        save(tiny_model(vocab_size=310), folder / name)
        tiny_tokenizer(tokens).save_pretrained(folder / name)
    return folder


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Path:
    """A copy of the models to spoil."""
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    return tmp_path


def weights(folder: Path) -> Path:
    return folder / "target" / "model.safetensors"


def truncated(folder: Path) -> list[str]:
    weights(folder).write_bytes(weights(folder).read_bytes()[:-100])
    return []


def garbage(folder: Path) -> list[str]:
    weights(folder).write_bytes(b"\xff" * 4096)
    return []


def with_nan(folder: Path) -> list[str]:
    tensors = load_file(weights(folder))
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, weights(folder))
    return []


def not_utf8(folder: Path) -> list[str]:
    (folder / "prompt.txt").write_bytes(b"caf\xe9")
    return ["--prompt-file", str(folder / "prompt.txt")]


def too_long(folder: Path) -> list[str]:
    (folder / "prompt.txt").write_text("zebra " * 200)
    return ["--prompt-file", str(folder / "prompt.txt")]


def empty(folder: Path) -> list[str]:
    (folder / "prompt.txt").write_text("")
    return ["--prompt-file", str(folder / "prompt.txt")]


def saved(folder: Path, model: str = "target") -> Path:
    file = folder / "prompt.kv"
    assert (
        main(
            ["generate", str(folder / model), "the cat sat on the mat", "--max-tokens", "1", "--save-cache", str(file)]
        )
        == 0
    )
    return file


def flipped(folder: Path) -> list[str]:
    data = bytearray(saved(folder).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "prompt.kv").write_bytes(data)
    return ["--load-cache", str(folder / "prompt.kv")]


def of_another_model(folder: Path) -> list[str]:
    file = saved(folder)
    tensors = load_file(weights(folder))
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, weights(folder))
    return ["--load-cache", str(file)]


CASES: dict[str, tuple[Spoil, str]] = {
    "missing folder": (lambda folder: shutil.rmtree(folder / "target") or [], "target"),
    "truncated safetensors": (truncated, "model.safetensors"),
    "corrupt safetensors": (garbage, "model.safetensors"),
    "NaN in weights": (with_nan, "model.layers.1.mlp.up_proj.weight"),
    "draft with another vocabulary": (lambda folder: ["--draft", str(folder / "stranger")], "vocabulary"),
    "prompt longer than the context": (too_long, "context of 128"),
    "empty prompt": (empty, "empty"),
    "invalid UTF-8": (not_utf8, "UTF-8"),
    "negative temperature": (lambda folder: ["--temperature", "-0.5"], "temperature"),
    "unwritable cache path": (
        lambda folder: ["--save-cache", str(folder / "no" / "such" / "folder")],
        "cannot be written",
    ),
    "missing saved cache": (lambda folder: ["--load-cache", str(folder / "nothing.kv")], "nothing.kv"),
    "saved cache with a flipped byte": (flipped, "checksum"),
    "saved cache of another model": (of_another_model, "another model"),
    "context that the model does not have": (lambda folder: ["--context", "100000"], "--context"),
    "mode that needs a draft": (lambda folder: ["--mode", "triforce", "--draft", "none"], "--draft"),
    "int8 of parts of pages": (lambda folder: ["--lower-tiers", "int8", "--retrieval-chunk", "24"], "multiple of 16"),
    "int8 of what has no native kernels": (
        lambda folder: ["--lower-tiers", "int8", "--dtype", "float16"],
        "--lower-tiers same",
    ),
    "bias of a token that does not exist": (lambda folder: ["--logit-bias", "9999=1"], "9999"),
}


@pytest.mark.parametrize("case", CASES)
def test_user_mistake_gives_one_clear_message(case: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spoil, named = CASES[case]
    options = spoil(folder)
    capfd.readouterr()
    prompt = [] if "--prompt-file" in options else ["the cat sat on the mat"]
    assert main(["generate", str(folder / "target"), *prompt, "--max-tokens", "4", *options]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("triforce: error: ") and err.count("\n") == 1, err
    assert named in err and "Traceback" not in err


def test_command_without_mistake_succeeds(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(folder / "target"), "the cat sat on the mat", "--max-tokens", "4", "--seed", "1"]
    assert main([*command, "--draft", str(folder / "draft"), "--retrieval-budget", "32", "--ignore-eos"]) == 0
    assert capfd.readouterr().out


@pytest.mark.filterwarnings("always::RuntimeWarning")
def test_failed_save_keeps_earlier_file_and_text_and_exits_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved(folder)
    saved_bytes = file.read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    command = [
        "generate",
        str(folder / "target"),
        "the hat and the cat",
        "--max-tokens",
        "4",
        "--seed",
        "1",
        "--save-cache",
        str(file),
    ]
    capsys.readouterr()
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert out.strip() and "triforce: error: cannot write the KV cache" in err and "Traceback" not in err
    assert file.read_bytes() == saved_bytes and [f.name for f in folder.iterdir() if f.is_file()] == ["prompt.kv"]

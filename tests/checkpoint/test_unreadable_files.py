"""Unreadable model files raise an error that says so, and does not advise to download them again."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_checkpoint import tiny_pair
from triforce.checkpoint import file_errors
from triforce.checkpoint.gguf.file import GGUFFile
from triforce.checkpoint.hub import model_path, read_json
from triforce.checkpoint.model_files import open_model
from triforce.checkpoint.model_sources import SMOLLM2, find
from triforce.errors import ModelError

CLOSED = r"cannot be read \(Permission denied\); have its owner let you read it, or name another model$"


@pytest.fixture
def deny(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Deny a file to every reader. Root would not be denied it."""

    def denied(path: Path) -> None:
        real = io.open

        def opened(file: Any, *arguments: Any, **options: Any) -> Any:
            if not isinstance(file, int) and Path(os.fsdecode(file)) == path:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
            return real(file, *arguments, **options)

        monkeypatch.setattr(io, "open", opened)

    return denied


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_pair(tmp_path, positions=64) / "target"


def test_closed_gguf_file_is_told(tmp_path: Path, deny: Callable[[Path], None]) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    deny(tmp_path / "model.gguf")
    for read in (model_path, GGUFFile):
        with pytest.raises(ModelError, match=rf"model\.gguf {CLOSED}"):
            read(tmp_path / "model.gguf")


def test_closed_files_of_folder_are_told(folder: Path, deny: Callable[[Path], None]) -> None:
    files = open_model(folder)
    assert files.config.vocab_size
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        deny(folder / name)
    with pytest.raises(ModelError, match=CLOSED):
        read_json(folder / "config.json")
    with pytest.raises(ModelError, match=rf"tokenizer\.json {CLOSED}"):
        files.tokenizer()
    with pytest.raises(ModelError, match=rf"model\.safetensors {CLOSED}"):
        files.archives(packed=False)


def test_unreachable_folder_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(ModelError, match=rf"config\.json {CLOSED}"):
        model_path(folder)


def test_closed_pickle_is_not_called_corrupt(tmp_path: Path) -> None:
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    assert str(file_errors.corrupt_file_error(tmp_path / "w.bin", error)).endswith("or name another model")


def test_folder_as_own_copy_of_known_model_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SMOLLM2.variable, str(tmp_path))
    with pytest.raises(ModelError, match=rf"{tmp_path}: Is a directory; set it to a copy"):
        find(SMOLLM2)

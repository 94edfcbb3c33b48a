"""Files that users name, and that have no end, are too large, or are no files."""

from __future__ import annotations

import io
import os
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.helpers.extras import skip_without_torch
from triforce import user_files
from triforce.cli import main
from triforce.cli.chat.conversation import Conversation, load
from triforce.cli.text_files import read_text
from triforce.errors import RequestError
from triforce.server.access import read_keys
from triforce.user_files import MOST_BYTES, PIECE, NotTextError, decode, read_all, read_file, read_line

MODEL = "no-such-model"  # files are read before a model is looked for
COMMANDS = {
    "prompt": ["generate", MODEL, "--prompt-file"],
    "schema": ["generate", MODEL, "-p", "text", "--json-schema"],
    "document": ["chat", MODEL, "--file"],
    "batch": ["batch"],
    "texts": ["train-draft", MODEL, "-o", "draft", "--texts"],
    "keys": ["serve", MODEL, "--api-key-file"],
}


@pytest.fixture
def holes(tmp_path: Path) -> Path:
    """A sparse file of 20 GB: nothing of it is written."""
    with (file := tmp_path / "holes").open("wb") as opened:
        opened.truncate(20_000_000_000)
    return file


@pytest.mark.parametrize("command", COMMANDS)
def test_device_without_an_end_is_refused(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    skip_without_torch(COMMANDS[command][0])
    assert main([*COMMANDS[command], "/dev/zero"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("triforce: error: /dev/zero is no regular file; give a ") and err.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_file_larger_than_any_text_is_refused(command: str, holes: Path, capfd: pytest.CaptureFixture[str]) -> None:
    skip_without_torch(COMMANDS[command][0])
    assert main([*COMMANDS[command], str(holes)]) == 2
    err = capfd.readouterr().err
    assert f"{holes} is larger than 256 MiB" in err and err.count("\n") == 1


def test_output_of_a_batch_that_is_no_text_is_refused(
    tmp_path: Path, holes: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text("{}\n")
    assert main(["batch", str(tmp_path / "in"), "-o", str(holes)]) == 2
    assert f"{holes} is larger than 256 MiB" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/full", "fifo"])
def test_conversation_is_neither_read_from_nor_saved_to_what_is_no_file(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    file = tmp_path / name
    with pytest.raises(RequestError, match="is no regular file; give a file that /save wrote"):
        load(file)
    with pytest.raises(RequestError, match="is no regular file; it would be lost: name another file"):
        Conversation().save(file, "model")


def test_pipe_is_read_as_text_and_keys(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for read in (read_text, read_keys):
        writer = Thread(target=(tmp_path / "fifo").write_text, args=("0123456789abcdef",))
        writer.start()
        assert "".join(read(str(tmp_path / "fifo"))) == "0123456789abcdef"
        writer.join()


@pytest.mark.parametrize("encoding", ["UTF-16LE", "UTF-16BE"])
def test_text_in_utf16_without_mark_is_whole_pairs(encoding: str) -> None:
    data = "abc".encode(encoding)
    with pytest.raises(NotTextError) as error:
        decode(data)
    assert error.value.conversion == f"iconv -f {encoding} -t UTF-8"
    assert decode(data[1:]) == data[1:].decode() and decode(b"a\0b\0c") == "a\0b\0c"


def test_terminal_is_read_until_its_first_end() -> None:
    master, terminal = os.openpty()
    os.write(master, b"a text\n\x04")
    assert read_file(f"/dev/fd/{terminal}") == b"a text\n"
    os.close(master)
    os.close(terminal)


def test_stream_is_read_in_pieces_up_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(io.RawIOBase):
        largest_read = 0

        def read(self, size: int = -1) -> bytes:
            self.largest_read = max(self.largest_read, size)
            return bytes(size)

    endless: Any = Endless()
    monkeypatch.setattr(user_files, "MOST_BYTES", 3 * PIECE)
    with pytest.raises(RequestError, match="stdin is larger than 3 MiB, which no model's context holds; give less"):
        read_all(endless, "stdin")
    assert endless.largest_read == PIECE < MOST_BYTES
    with pytest.raises(RequestError, match="a line of stdin is larger than 3 MiB"):
        read_line(io.BytesIO(bytes(4 * PIECE)), "stdin")

"""`triforce batch` again: answers of other requests, models or settings are not taken for the requested ones."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.batch_files import answers, arguments, line
from triforce.backends import dispatch
from triforce.cli import main
from triforce.server.batch import sole_writer


def batch(folder: Path, pair: Path, lines: list[str], *extra_options: str) -> int:
    """Run a batch of lines, and return its exit code."""
    (folder / "in.jsonl").write_text("".join(lines))
    return main(arguments(pair, folder / "in.jsonl", folder / "out.jsonl", *extra_options))


def short(name: str, prompt: str) -> str:
    return line(name, "/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 4})


@pytest.mark.parametrize("change", ["request", "context", "coupling", "KV type", "model"])
def test_batch_answers_of_something_else_are_not_taken(
    pair: Path, tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [short("a", "the cat"), short("b", "the hat"), short("c", "the mat")]
    assert batch(tmp_path, pair, lines) == 0
    old_answers = answers(tmp_path)
    extra_options: list[str] = {"context": ["--context", "64"], "coupling": ["--coupling", "block"]}.get(change, [])
    if change == "request":
        lines[1] = short("b", "the dog")
    elif change == "KV type":
        if dispatch.native is None:
            pytest.skip("the native kernels were not built")
        extra_options = ["--kv-dtype", "int8"]
    elif change == "model":
        pair = other_model(pair, tmp_path)
    written = (tmp_path / "out.jsonl").read_bytes()
    capsys.readouterr()
    assert batch(tmp_path, pair, lines, *extra_options) == 2
    assert (tmp_path / "out.jsonl").read_bytes() == written
    count = 1 if change == "request" else 3
    stderr = capsys.readouterr().err
    assert f"{count} of the 3 answers in" in stderr and "--again" in stderr
    assert batch(tmp_path, pair, lines, "--again", *extra_options) == 0
    new_answers = answers(tmp_path)
    assert [answer["custom_id"] for answer in new_answers] == [answer["custom_id"] for answer in old_answers]
    kept_ids = {new["custom_id"] for new, old in zip(new_answers, old_answers, strict=True) if new == old}
    assert kept_ids == ({"a", "c"} if count == 1 else set())
    assert f"{count} answered, 0 refused, {3 - count} skipped" in capsys.readouterr().err
    assert batch(tmp_path, pair, lines, *extra_options) == 0
    assert answers(tmp_path) == new_answers


def other_model(pair: Path, folder: Path) -> Path:
    """A pair whose target has other weights."""
    other_folder = Path(shutil.copytree(pair, folder / "other"))
    file = other_folder / "target" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return other_folder


def test_batch_mode_and_limits_make_no_other_answers(pair: Path, tmp_path: Path) -> None:
    assert batch(tmp_path, pair, [short("a", "the cat")]) == 0
    assert batch(tmp_path, pair, [short("a", "the cat"), short("b", "the hat")], "--mode", "ar") == 0
    assert len(answers(tmp_path)) == 2


def test_batch_answers_without_digest_are_kept_and_told_of(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(tmp_path, pair, [short("a", "the cat")]) == 0
    (answer,) = answers(tmp_path)
    del answer["digest"]
    (tmp_path / "out.jsonl").write_text(json.dumps(answer) + "\n")
    capsys.readouterr()
    assert batch(tmp_path, pair, [short("a", "the dog")]) == 0
    assert "1 answer in" in capsys.readouterr().err and answers(tmp_path) == [answer]


def test_batch_killed_while_answering_again_keeps_the_later_answer(pair: Path, tmp_path: Path) -> None:
    """A killed run leaves the new answer behind the earlier one; the next run keeps the new answer."""
    assert batch(tmp_path, pair, [short("a", "the cat"), short("b", "the hat")]) == 0
    earlier = (tmp_path / "out.jsonl").read_bytes()
    assert batch(tmp_path, pair, [short("a", "the dog"), short("b", "the hat")], "--again") == 0
    ended = (tmp_path / "out.jsonl").read_bytes()
    (new,) = set(ended.splitlines(keepends=True)) - set(earlier.splitlines(keepends=True))
    (tmp_path / "out.jsonl").write_bytes(earlier + new)
    assert batch(tmp_path, pair, [short("a", "the dog"), short("b", "the hat")]) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == ended


def test_batch_again_keeps_what_it_refuses(pair: Path, tmp_path: Path) -> None:
    """Refusals stand in the output once each, after the answers as in any run, or in the place of a stale answer."""
    refused = ["no JSON\n", line("hot", "/v1/completions", {"prompt": "x", "temperature": -1})]
    cold = line("c", "/v1/completions", {"prompt": "x", "temperature": -1})
    assert batch(tmp_path, pair, [short("a", "the cat"), short("b", "the hat"), short("c", "the mat"), *refused]) == 1
    order = [answer["custom_id"] for answer in answers(tmp_path) if answer["custom_id"] in list("abc")]
    assert batch(tmp_path, pair, [short("a", "the dog"), short("b", "the hat"), cold, *refused], "--again") == 1
    codes = {answer["custom_id"]: (answer["response"] or {}).get("status_code") for answer in answers(tmp_path)}
    assert len(answers(tmp_path)) == 5 and codes == {"a": 200, "b": 200, "c": 400, None: None, "hot": 400}
    assert [answer["custom_id"] for answer in answers(tmp_path)][:3] == order


@pytest.mark.parametrize("named", ["out.jsonl", "link"])
def test_batch_refuses_an_output_that_another_batch_writes(
    pair: Path, tmp_path: Path, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch removes its lock when it ends. The lock file of a killed batch does not refuse the next batch."""
    (tmp_path / "link").symlink_to("out.jsonl")
    with sole_writer(tmp_path / named):
        assert batch(tmp_path, pair, [short("a", "the cat")]) == 2
        assert not (tmp_path / "out.jsonl").exists()
    stderr = capsys.readouterr().err
    assert "out.jsonl is being written by another triforce batch; wait for it" in stderr and stderr.count("\n") == 1
    (tmp_path / "out.jsonl.lock").touch()
    assert batch(tmp_path, pair, [short("a", "the cat")]) == 0
    assert len(answers(tmp_path)) == 1 and not (tmp_path / "out.jsonl.lock").exists()


def test_batch_goes_on_where_a_file_system_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr("triforce.server.batch.fcntl.flock", flock)
    with sole_writer(tmp_path / "out.jsonl"), sole_writer(tmp_path / "out.jsonl"):
        pass
    assert not list(tmp_path.iterdir())


def test_batch_again_needs_a_file(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text(short("a", "the cat"))
    assert main(arguments(pair, tmp_path / "in.jsonl", Path("-"), "--again")) == 2
    assert "--again needs a file of answers" in capsys.readouterr().err


def test_batch_that_is_answered_loads_no_model(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert batch(tmp_path, pair, [short("a", "the cat")]) == 0
    monkeypatch.setattr("triforce.cli.batch.load", None)
    assert batch(tmp_path, pair, [short("a", "the cat")]) == 0
    assert len(answers(tmp_path)) == 1

"""`triforce watch` as users meet it: what it reads, what it says, and who starts from it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import watched_folder
from tests.helpers.asgi_client import ask
from tests.helpers.tty import Tty
from tests.helpers.watched_folder import STABLE, WORDS, asked, kept, models, watch_once, write
from triforce.cli import main
from triforce.disk_cache.folder import CacheFolder
from triforce.disk_cache.prefixes import SEGMENT
from triforce.llm import LLM

folder = watched_folder.folder  # a fixture


def test_folder_that_was_watched_is_asked_about_at_once(
    pair: Path, folder: Path, capsys: pytest.CaptureFixture[str], stdin: Any
) -> None:
    cache = folder.with_name("cache")
    assert watch_once(pair, folder, cache) == 0
    assert capsys.readouterr() == ("", ""), "nobody is at a terminal"
    assert kept(asked(pair, folder, cache, capsys))
    stdin(b"what was it?\n")
    command = ["chat", *models(pair), "--file", str(folder), "--disk-cache", str(cache), "--max-tokens", "2"]
    assert main(command) == 0
    assert "of them cached" in capsys.readouterr().err


def test_watch_has_the_lowest_priority(pair: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    increments = list[int]()
    monkeypatch.setattr(os, "nice", increments.append)
    assert watch_once(pair, folder, folder.with_name("cache")) == 0
    assert increments == [19]


def test_changed_file_is_read_from_its_change_on(
    pair: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, told = folder.with_name("cache"), list[list[int]]()
    for text in (WORDS * 30, WORDS * 30, WORDS * 4 + "the winter of despair " * 22):
        write(folder / "new.txt", text, 2)
        monkeypatch.setattr(sys, "stderr", Tty())
        assert watch_once(pair, folder, cache) == 0
        (line,) = (line for line in sys.stderr.getvalue().splitlines() if "texts: " in line)  # type: ignore[attr-defined]
        told.append([int(word.replace(",", "")) for word in line.split() if word.replace(",", "").isdecimal()])
    (tokens, nothing), (_, again), (_, after) = told
    common = len(STABLE) + len(WORDS * 4)
    assert nothing == 0 and again >= tokens - SEGMENT - 40 and SEGMENT <= after < again
    assert after <= common
    monkeypatch.undo()
    assert kept(asked(pair, folder, cache, capsys))


def test_books_are_documents_of_their_own(pair: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = folder.with_name("cache")
    assert watch_once(pair, folder, cache, "--each") == 0
    assert kept(asked(pair, folder / "stable.txt", cache, capsys))
    assert main(["cache", "list", str(cache)]) == 0
    assert f"{folder} was read by triforce watch: 2 files" in capsys.readouterr().out


def test_folder_is_found_whole_behind_its_files_one_by_one(
    pair: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = folder.with_name("cache")
    assert watch_once(pair, folder, cache, "--each") == watch_once(pair, folder, cache) == 0
    assert kept(asked(pair, folder, cache, capsys))


def test_folder_that_does_not_fit_is_one_line(pair: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = folder.with_name("cache")
    assert watch_once(pair, folder, cache, "--context", "128") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "the context is 128" in said and "--each" in said
    assert watch_once(pair, folder, cache, "--context", "128", "--each") == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "--disk-cache", "cache"], "nowhere is no folder"),
        (["empty", "--disk-cache", "cache"], "there is no text in"),
        (["texts", "--disk-cache", "texts"], "cannot be a disk cache|holds other files|open to other users"),
    ],
)
def test_watch_mistakes_are_one_line(
    pair: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(folder.parent)
    Path("empty").mkdir()
    assert main(["watch", *arguments, *models(pair), "--once"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("triforce: error: ") and line.count("\n") == 1
    assert any(part in line for part in said.split("|"))


def test_watch_needs_a_disk_cache(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["watch", "."])
    assert end.value.code == 2 and "--disk-cache" in capsys.readouterr().err


def test_page_offers_what_was_watched(pair: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from triforce.server.app import create_app
    from triforce.server.engine_thread import Worker
    from triforce.server.limits import Limits

    cache = folder.with_name("cache")
    assert watch_once(pair, folder, cache) == 0
    llm = LLM(pair / "target", pair / "draft", retrieval_budget=64, mode="ar", disk_cache=cache)
    worker = Worker(llm, Limits())
    app = create_app(llm, worker, "tiny", watched=CacheFolder(cache))
    (offered,) = ask(app, "/documents").json()["documents"]
    text = ask(app, f"/documents/{offered['id']}").text
    assert offered["name"] == "texts" and STABLE in text and "--- new.txt ---" in text
    question = {"messages": [{"role": "user", "content": f"{text}\n\nwhat was it?"}], "max_tokens": 1}
    usage = ask(app, "/v1/chat/completions", question).json()["usage"]
    assert kept({"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"], **usage})
    for name in ("unknown", "..%2fsecret"):
        assert ask(app, f"/documents/{name}").status_code == 404
    assert ask(create_app(llm, worker, "tiny"), "/documents").json() == {"documents": []}
    worker.stop()


@pytest.mark.parametrize("more", [[], ["--disk-cache", "cache"]])
def test_show_watched_needs_cache_and_no_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if more:
        monkeypatch.setenv("TRIFORCE_API_KEYS", "a-key-of-many-letters")
    assert main(["serve", "--show-watched", *more]) == 2
    assert "triforce: error: --show-watched needs --disk-cache" in capsys.readouterr().err

"""A folder of two texts that `triforce watch` prefills into a disk cache, and checks of that cache."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from triforce.cli import main
from triforce.disk_cache import prefixes
from triforce.disk_cache.prefixes import SEGMENT

STABLE = "It was the season of light, it was the season of darkness. " * 14
WORDS = "the spring of hope "


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of two texts. Reads from a disk cache take no measured time."""
    monkeypatch.setattr(prefixes, "perf_counter", lambda: 0.0)
    (tmp_path / "texts").mkdir()
    write(tmp_path / "texts" / "stable.txt", STABLE, 1)
    write(tmp_path / "texts" / "new.txt", WORDS * 30, 2)
    return tmp_path / "texts"


def write(path: Path, text: str, second: int) -> None:
    path.write_text(text)
    os.utime(path, (second, second))


def models(pair: Path) -> list[str]:
    return ["-m", str(pair / "target"), "--draft", str(pair / "draft"), "--retrieval-budget", "64", "--mode", "ar"]


def watch_once(pair: Path, folder: Path, cache: Path, *options: str) -> int:
    return main(["watch", str(folder), *models(pair), "--disk-cache", str(cache), "--once", *options])


def asked(pair: Path, file: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the JSON report of `generate` on a prefilled document."""
    command = ["generate", *models(pair), "--chat", "--prompt-file", str(file), "--disk-cache", str(cache)]
    assert main([*command, "-n", "2", "--ignore-eos", "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def kept(report: dict[str, Any]) -> bool:
    """Whether all segments of a prompt were restored from the cache."""
    return bool(report["cached_tokens"] >= (report["prompt_tokens"] - 40) // SEGMENT * SEGMENT > 0)
